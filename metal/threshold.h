// Thresholds of the filters: the largest t for which the weights of {z >= t}
// reach a target. Each pass adds the weights to 256 bins of an interval and
// goes on in the bin where the sum reaches the target, until the interval is a
// single value. Weights are integers: the result is exact, ties included, and
// does not depend on any order.
#pragma once

#include "density.h"
#include "fixed_point.h"

constant constexpr int BINS = 256;

// Low bits of a float that a value of this type never uses.
METAL_FUNC uint spare_bits(float) {
  return 0;
}

METAL_FUNC uint spare_bits(half) {
  return 13;
}

METAL_FUNC uint spare_bits(bfloat) {
  return 16;
}

// An integer that orders like z. Both zeros have one key.
METAL_FUNC uint to_key(float z, uint spare) {
  uint bits = z == 0.0f ? 0u : as_type<uint>(z);
  return (bits >> 31 ? ~bits : bits | 0x80000000u) >> spare;
}

METAL_FUNC float from_key(uint key, uint spare) {
  uint bits = key << spare;
  bool negative = !(bits >> 31);
  return as_type<float>(
      negative ? ~(bits | ((1u << spare) - 1u)) : bits & 0x7fffffffu);
}

// The keys from low to high in bins, the largest first. Bins of equal width in
// z spread the values of a row best, bins of equal width in keys can split any
// interval.
struct Bins {
  uint low;
  uint high;
  uint shift;
  bool by_value;
  float top;
  float per_unit;
};

METAL_FUNC int bin_of(Bins bins, uint key, float z) {
  if (bins.by_value) {
    float x = (bins.top - z) * bins.per_unit;
    return x < float(BINS - 1) ? int(x) : BINS - 1;
  }
  return int((bins.high - key) >> bins.shift);
}

METAL_FUNC Bins make_bins(uint low, uint high, uint spare, bool first) {
  Bins bins = {low, high, 0, false, 0.0f, 0.0f};
  uint width = high - low;
  if (first && width >= uint(BINS)) {
    float bottom = from_key(low, spare);
    bins.by_value = true;
    bins.top = from_key(high, spare);
    // Without a lower bound: what lies more than 32 below the top is not likely
    // to matter.
    float range = bottom > LOWEST ? bins.top - bottom : 32.0f;
    bins.per_unit = metal::clamp(float(BINS) / range, 1e-30f, 1e30f);
  }
  while ((width >> bins.shift) >= uint(BINS)) {
    ++bins.shift;
  }
  return bins;
}

// The smallest key from low on whose bin is at most `bin`, high + 1 if there is
// none. Every lane tries another one.
METAL_FUNC uint first_key(Bins bins, int bin, uint spare, uint lane) {
  uint low = bins.low;
  uint high = bins.high + 1u;
  while (low < high) {
    uint step = (high - low) / 32u + 1u;
    uint key = metal::min(low + lane * step, high);
    bool reached =
        key == high || bin_of(bins, key, from_key(key, spare)) <= bin;
    uint first = metal::ctz(lanes_where(reached));
    uint end = metal::min(low + first * step, high);
    low = first == 0 ? low : metal::min(end - step + 1u, high);
    high = first == 0 ? low : end;
  }
  return low;
}

// A running sum of one thread that goes to the histogram when the bin changes:
// rows of equal logits would otherwise queue for a single bin.
struct Run {
  int bin;
  ulong sum;
};

METAL_FUNC void flush(threadgroup atomic_uint* histogram, Run run) {
  uint low = uint(run.sum);
  uint high = uint(run.sum >> 32);
  uint old = atomic_fetch_add_explicit(
      &histogram[2 * run.bin], low, memory_order_relaxed);
  high += old + low < low ? 1u : 0u;
  if (high > 0) {
    atomic_fetch_add_explicit(
        &histogram[2 * run.bin + 1], high, memory_order_relaxed);
  }
}

METAL_FUNC Run add_to(
    threadgroup atomic_uint* histogram,
    Run run,
    Bins bins,
    uint key,
    float z,
    ulong weight) {
  int bin = bin_of(bins, key, z);
  if (bin != run.bin) {
    if (run.sum > 0) {
      flush(histogram, run);
    }
    run = Run{bin, 0ul};
  }
  run.sum += weight;
  return run;
}

// The maximum of each group of a row.
struct Maxima {
  const device float* data;
  int size;
};

// The logits of a row, weighted by their probability, or each with weight 1.
// Groups of which no logit can reach the interval are not read.
template <typename T>
struct Weighted {
  Row<T> row;
  Maxima maxima;
  Density density;
  bool count;
};

// Only the maxima of its groups: a lower bound of all sums.
struct WeightedMaxima {
  Maxima maxima;
  Density density;
};

METAL_FUNC ulong weight_of(Density d, bool count, float z) {
  return count ? 1ul : fixed_point(spread_probability(d, z));
}

METAL_FUNC void add_all(
    threadgroup atomic_uint* histogram,
    WeightedMaxima x,
    Bins bins,
    uint spare,
    Team team) {
  Run run = {0, 0ul};
  for (int i = int(team.thread_index); i < x.maxima.size;
       i += int(team.threads)) {
    float z = x.maxima.data[i];
    uint key = to_key(z, spare);
    if (key >= bins.low && key <= bins.high) {
      ulong weight = weight_of(x.density, false, z);
      run = add_to(histogram, run, bins, key, z, weight);
    }
  }
  if (run.sum > 0) {
    flush(histogram, run);
  }
}

// The group that a simdgroup looks at in turn `step` and lane `lane`:
// neighbours, which often reach the threshold together, go to different
// simdgroups.
METAL_FUNC int group_of(int step, uint lane, Team team) {
  return (step * 32 + int(lane)) * int(team.simdgroups) + int(team.simdgroup);
}

METAL_FUNC int steps_of(int groups, Team team) {
  int all = int(team.threads);
  return (groups + all - 1) / all;
}

// The lanes whose group reaches t in this turn.
METAL_FUNC uint hot_groups(Maxima maxima, float t, int step, Team team) {
  int group = group_of(step, team.lane, team);
  return lanes_where(group < maxima.size && maxima.data[group] >= t);
}

template <typename T>
METAL_FUNC void add_all(
    threadgroup atomic_uint* histogram,
    Weighted<T> x,
    Bins bins,
    uint spare,
    Team team) {
  Run run = {0, 0ul};
  float lowest = from_key(bins.low, spare);
  for (int step = 0; step < steps_of(x.maxima.size, team); ++step) {
    uint hot = hot_groups(x.maxima, lowest, step, team);
    for (; hot != 0; hot &= hot - 1u) {
      int group = group_of(step, metal::ctz(hot), team);
      Eight e = load8(x.row, group * GROUP + int(team.lane) * 8);
      for (int i = 0; i < 8; ++i) {
        if (!(e.z[i] >= lowest)) {
          continue;
        }
        uint key = to_key(e.z[i], spare);
        if (key <= bins.high) {
          ulong weight = weight_of(x.density, x.count, e.z[i]);
          run = add_to(histogram, run, bins, key, e.z[i], weight);
        }
      }
    }
  }
  if (run.sum > 0) {
    flush(histogram, run);
  }
}

// The bin where the sum from bin 0 on passes the threshold, -1 if it never
// does, and what is left of the threshold there.
METAL_FUNC Pick
pick_bin(threadgroup atomic_uint* histogram, ulong threshold, uint lane) {
  int each = BINS / 32;
  ulong sums[8];
  ulong mine = 0;
  for (int i = 0; i < each; ++i) {
    int bin = int(lane) * each + i;
    ulong low = atomic_load_explicit(&histogram[2 * bin], memory_order_relaxed);
    ulong high =
        atomic_load_explicit(&histogram[2 * bin + 1], memory_order_relaxed);
    sums[i] = (high << 32) + low;
    mine += sums[i];
  }
  Pick found = pick(mine, simd_prefix(mine, lane), threshold);
  if (found.rest == TAKE_LAST) {
    return Pick{-1, 0ul};
  }
  int bin = 0;
  ulong rest = found.rest;
  for (; bin < each - 1 && sums[bin] <= rest; ++bin) {
    rest -= sums[bin];
  }
  uint from = uint(found.lane);
  return Pick{
      simd_shuffle(int(lane) * each + bin, ushort(from)), shuffle(rest, from)};
}

// The same for the weights of a source.
template <typename Source>
METAL_FUNC Pick find_bin(
    Source source,
    Bins bins,
    uint spare,
    ulong threshold,
    threadgroup atomic_uint* histogram,
    Team team) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = team.thread_index; i < 2u * uint(BINS); i += team.threads) {
    atomic_store_explicit(&histogram[i], 0u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  add_all(histogram, source, bins, spare, team);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return pick_bin(histogram, threshold, team.lane);
}

// The largest t in [bottom, top] for which the weights of {z >= t} reach
// `target`, -INFINITY if they never do.
template <typename Source>
METAL_FUNC float find_threshold(
    Source source,
    float bottom,
    float top,
    uint spare,
    ulong target,
    threadgroup atomic_uint* histogram,
    Team team) {
  uint low = to_key(bottom, spare);
  uint high = to_key(top, spare);
  ulong threshold = metal::max(target, 1ul) - 1ul;
  for (bool first = true; first || low < high; first = false) {
    Bins bins = make_bins(low, high, spare, first);
    Pick bin = find_bin(source, bins, spare, threshold, histogram, team);
    if (bin.lane < 0) {
      return -INFINITY;
    }
    threshold = bin.rest;
    low = first_key(bins, bin.lane, spare, team.lane);
    if (bin.lane > 0) {
      high = first_key(bins, bin.lane - 1, spare, team.lane) - 1u;
    }
  }
  return from_key(low, spare);
}

// The weight of {z >= t}, in every thread. `sums` has one value a simdgroup. A
// barrier has to lie between two calls.
template <typename T>
METAL_FUNC ulong
total_weight(Weighted<T> x, float t, threadgroup ulong* sums, Team team) {
  ulong sum = 0;
  for (int step = 0; step < steps_of(x.maxima.size, team); ++step) {
    uint hot = hot_groups(x.maxima, t, step, team);
    for (; hot != 0; hot &= hot - 1u) {
      int group = group_of(step, metal::ctz(hot), team);
      Eight e = load8(x.row, group * GROUP + int(team.lane) * 8);
      for (int i = 0; i < 8; ++i) {
        sum += e.z[i] >= t ? weight_of(x.density, x.count, e.z[i]) : 0ul;
      }
    }
  }
  sum = simd_total(sum);
  if (team.lane == 0) {
    sums[team.simdgroup] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_total(team.lane < team.simdgroups ? sums[team.lane] : 0ul);
}

// Below the end of a bin of find_bound() by more than any rounding.
METAL_FUNC float end_of_bin(float top, int bin) {
  float end = top - float(bin + 1) * (32.0f / float(BINS));
  return end - 1e-6f * (metal::max(top, -top) + metal::max(end, -end));
}

// A t for which {z >= t} reaches the target: the maxima of the groups alone do.
// -INFINITY if there is none that is near the largest logit.
METAL_FUNC float find_bound(
    WeightedMaxima x,
    ulong target,
    threadgroup atomic_uint* histogram,
    Team team) {
  float top = x.density.ref;
  Bins bins = {0u, to_key(top, 0u), 0, true, top, float(BINS) / 32.0f};
  ulong threshold = metal::max(target, 1ul) - 1ul;
  int bin = find_bin(x, bins, 0u, threshold, histogram, team).lane;
  return bin < 0 || bin == BINS - 1 ? -INFINITY : end_of_bin(top, bin);
}

// Candidates that a row may have in threadgroup memory.
constant constexpr int FEW = 512;

// The same bound where k logits are the target: k of FEW sets of groups reach
// it. Each turn tries 16 ends of bins.
METAL_FUNC float find_count_bound(
    Maxima maxima,
    float top,
    int k,
    threadgroup float* largest, // FEW
    threadgroup atomic_uint* counts,
    Team team) {
  for (int i = int(team.thread_index); i < FEW; i += int(team.threads)) {
    float z = -INFINITY;
    for (int j = i; j < maxima.size; j += FEW) {
      z = metal::max(z, maxima.data[j]);
    }
    largest[i] = z;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int bin = 0;
#pragma unroll 1
  for (int width = BINS / 16; width > 0; width /= 16) {
    for (int j = int(team.simdgroup); j < 16; j += int(team.simdgroups)) {
      float t = end_of_bin(top, bin + (j + 1) * width - 1);
      uint count = 0;
      for (int i = int(team.lane); i < FEW; i += 32) {
        count += largest[i] >= t ? 1u : 0u;
      }
      count = simd_sum(count);
      if (team.lane == 0) {
        atomic_store_explicit(&counts[j], count, memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint lane = metal::min(team.lane, 15u);
    uint count = atomic_load_explicit(&counts[lane], memory_order_relaxed);
    uint reached = lanes_where(count >= uint(k)) | (1u << 15);
    bin += int(metal::ctz(reached)) * width;
    counts += 16;
  }
  return bin == BINS - 1 ? -INFINITY : end_of_bin(top, bin);
}

// The k-th largest logit.
template <typename T>
METAL_FUNC float find_top_k(
    Weighted<T> x,
    int k,
    float bottom,
    threadgroup atomic_uint* histogram,
    Team team) {
  x.count = true;
  uint spare = spare_bits(T(0.0f));
  float top = x.density.ref;
  return find_threshold(x, bottom, top, spare, ulong(k), histogram, team);
}

// The smallest kept logit of {z >= from} that holds `target` of its weight.
template <typename T>
METAL_FUNC float find_top_p(
    Weighted<T> x,
    float from,
    ulong target,
    threadgroup atomic_uint* histogram,
    Team team) {
  uint spare = spare_bits(T(0.0f));
  float top = x.density.ref;
  return find_threshold(x, from, top, spare, target, histogram, team);
}

// All logits below this together have half of the mass that may be cut.
METAL_FUNC float cut_bound(Density d, float top_p, int size) {
  float cut = 0.5f * (1.0f - top_p) / (d.scale * float(size));
  return metal::min(d.ref + metal::log(cut) / d.inv_t, d.ref);
}

// The largest logits of a row in threadgroup memory, in any order, where they
// are not more than FEW. What is asked of them is counted pair by pair.
struct Few {
  threadgroup int* ids;
  threadgroup float* z;
  threadgroup ulong* weights;
  threadgroup atomic_uint*
      shared; // the count, 3 for each find_few(), the groups
  int count;
};

// Those of 8 logits that are at least `bottom`.
METAL_FUNC void collect_eight(Few few, Eight e, int id, float bottom) {
  uint hits = 0;
  for (int i = 0; i < 8; ++i) {
    hits |= e.z[i] >= bottom ? 1u << i : 0u;
  }
  if (hits == 0) {
    return;
  }
  uint at = atomic_fetch_add_explicit(
      &few.shared[0], metal::popcount(hits), memory_order_relaxed);
  for (int i = 0; i < 8; ++i) {
    if (((hits >> i) & 1u) != 0 && at < uint(FEW)) {
      few.ids[at] = id + i;
      few.z[at] = e.z[i];
      ++at;
    }
  }
}

METAL_FUNC int group_at(threadgroup atomic_uint* list, int i) {
  return int(atomic_load_explicit(&list[i], memory_order_relaxed));
}

// {z >= bottom}. Only `count` is of use if it is more than FEW. `list` is for
// the groups, of which each has at least one.
template <typename T>
METAL_FUNC Few collect(
    Few few,
    Weighted<T> x,
    float bottom,
    threadgroup atomic_uint* list,
    Team team) {
  for (uint i = team.thread_index; i < 8; i += team.threads) {
    uint none = i == 1 || i == 4 ? as_type<uint>(-INFINITY) : 0u;
    atomic_store_explicit(&few.shared[i], none, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(team.thread_index); i < x.maxima.size;
       i += int(team.threads)) {
    if (x.maxima.data[i] >= bottom) {
      uint at =
          atomic_fetch_add_explicit(&few.shared[7], 1u, memory_order_relaxed);
      if (at < uint(FEW)) {
        atomic_store_explicit(&list[at], uint(i), memory_order_relaxed);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int hot = int(atomic_load_explicit(&few.shared[7], memory_order_relaxed));
  few.count = hot;
  if (hot > FEW) {
    return few;
  }
  int step = int(team.simdgroups);
#pragma unroll 1
  for (int i = int(team.simdgroup); i < hot; i += 2 * step) {
    // Both groups are read before one is used.
    int second = i + step < hot ? i + step : i;
    int id = group_at(list, i) * GROUP + int(team.lane) * 8;
    int next = group_at(list, second) * GROUP + int(team.lane) * 8;
    Eight e = load8(x.row, id);
    Eight f = load8(x.row, next);
    collect_eight(few, e, id, bottom);
    if (second != i) {
      collect_eight(few, f, next, bottom);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  few.count = int(atomic_load_explicit(&few.shared[0], memory_order_relaxed));
#pragma unroll 1
  for (int i = int(team.thread_index); i < metal::min(few.count, FEW);
       i += int(team.threads)) {
    few.weights[i] = weight_of(x.density, false, few.z[i]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return few;
}

struct Found {
  float z;
  ulong mass; // the weight of what is at least z
};

// Of the logits above one of the few, and with its equals: weight and number.
struct Rank {
  ulong above;
  ulong mass;
  int before;
  int through;
};

METAL_FUNC Rank rank_of(Few few, int i) {
  Rank rank = {0, 0, 0, 0};
  float z = few.z[i];
#pragma unroll 4
  for (int j = 0; j < few.count; ++j) {
    float other = few.z[j];
    ulong weight = few.weights[j];
    rank.above += other > z ? weight : 0ul;
    rank.mass += other >= z ? weight : 0ul;
    rank.before += other > z ? 1 : 0;
    rank.through += other >= z ? 1 : 0;
  }
  return rank;
}

// The largest z from `from` on for which the weights of what is at least z
// reach `target`, -INFINITY if they never do. With `count` each has weight 1.
// Once for each `count` after collect(). `mine` is the rank of the candidate
// that has the index of the thread.
METAL_FUNC Found
find_few(Few few, Rank mine, float from, bool count, ulong target, Team team) {
  threadgroup atomic_uint* found = &few.shared[count ? 1 : 4];
  for (int i = int(team.thread_index); i < few.count; i += int(team.threads)) {
    Rank rank = mine;
    if (i != int(team.thread_index)) {
      rank = rank_of(few, i);
    }
    ulong above = count ? ulong(rank.before) : rank.above;
    ulong through = count ? ulong(rank.through) : rank.mass;
    float z = few.z[i];
    // Equal logits find the same.
    if (z >= from && above < target && through >= target) {
      atomic_store_explicit(&found[0], as_type<uint>(z), memory_order_relaxed);
      atomic_store_explicit(&found[1], uint(rank.mass), memory_order_relaxed);
      atomic_store_explicit(
          &found[2], uint(rank.mass >> 32), memory_order_relaxed);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong low = atomic_load_explicit(&found[1], memory_order_relaxed);
  ulong high = atomic_load_explicit(&found[2], memory_order_relaxed);
  uint z = atomic_load_explicit(&found[0], memory_order_relaxed);
  return Found{as_type<float>(z), (high << 32) + low};
}

// The weight of {z >= t} by a density, in every thread.
METAL_FUNC ulong
total_of_few(Few few, Density d, float t, threadgroup ulong* sums, Team team) {
  ulong sum = 0;
  for (int i = int(team.thread_index); i < few.count; i += int(team.threads)) {
    sum += few.z[i] >= t ? weight_of(d, false, few.z[i]) : 0ul;
  }
  sum = simd_total(sum);
  if (team.lane == 0) {
    sums[team.simdgroup] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_total(team.lane < team.simdgroups ? sums[team.lane] : 0ul);
}

// What the threshold kernels keep in threadgroup memory.
struct Workspace {
  threadgroup atomic_uint* histogram; // 2 * BINS
  threadgroup ulong* sums; // 32
  Few few;
};

// The threshold of top-k and top-p over few logits, weighted for top-p.
METAL_FUNC Found threshold_of_few(Few few, Sampling params, int k, Team team) {
  Found t = {-INFINITY, ONE};
  Rank mine = {0, 0, 0, 0};
  if (int(team.thread_index) < few.count) {
    mine = rank_of(few, int(team.thread_index));
  }
  if (k > 0) {
    t = find_few(few, mine, -INFINITY, true, ulong(k), team);
  }
  if (!(params.top_p < 1.0f)) {
    return t;
  }
  Found from = t;
  if (!params.temperature_first) {
    from = Found{-INFINITY, ONE};
  }
  ulong target = scale_by(from.mass, fine_uniform(params.top_p, 0.0f));
  target = metal::max(target, 1ul);
  Found after = find_few(few, mine, from.z, false, target, team);
  if (after.z > t.z) {
    t = after;
  }
  return t;
}

// The same over any number of them, all at least `bottom`.
template <typename T>
METAL_FUNC_SLOW float threshold_of_many(
    Weighted<T> x,
    float bottom,
    Sampling params,
    int k,
    Workspace work,
    Team team) {
  float t = -INFINITY;
  if (k > 0) {
    t = find_top_k(x, k, bottom, work.histogram, team);
  }
  if (params.top_p < 1.0f) {
    float from = params.temperature_first ? t : -INFINITY;
    ulong all = ONE;
    if (from > -INFINITY) {
      all = total_weight(x, from, work.sums, team);
    }
    ulong target = scale_by(all, fine_uniform(params.top_p, 0.0f));
    // With top-k, `bottom` says nothing about mass.
    float low = from;
    if (from == -INFINITY) {
      low = cut_bound(x.density, params.top_p, x.row.size);
      low = k > 0 ? low : metal::max(low, bottom);
    }
    t = metal::max(t, find_top_p(x, low, target, work.histogram, team));
  }
  return t;
}

// Adds the filters to a density, see SamplingParams. The whole threadgroup
// takes part.
template <typename T>
METAL_FUNC Density apply_filters(
    Row<T> row,
    Maxima maxima,
    Partial sums_of_row,
    Sampling params,
    Workspace work,
    Team team) {
  float inv_t = inverse_temperature(params.temperature);
  Density d = make_density(sums_of_row, inv_t, -INFINITY);
  if (!is_valid(params) || d.usable == 0) {
    return unusable_density();
  }
  if (d.point >= 0) {
    return d;
  }
  Weighted<T> x = {row, maxima, d, false};
  if (!params.temperature_first) {
    x.density.inv_t = 1.0f;
    x.density.scale = 1.0f / sums_of_row.sum;
  }
  bool has_top_k = params.top_k > 0.0f && params.top_k < float(row.size);
  int k = has_top_k ? int(params.top_k) : 0;
  float bottom = -INFINITY;
  if (has_top_k) {
    bottom =
        find_count_bound(maxima, d.ref, k, work.few.z, work.histogram, team);
  } else if (params.top_p < 1.0f) {
    ulong target = scale_by(ONE, fine_uniform(params.top_p, 0.0f));
    WeightedMaxima largest = {maxima, x.density};
    bottom = find_bound(largest, target, work.histogram, team);
  }
  Few few = work.few;
  if (bottom > -INFINITY) {
    few = collect(few, x, bottom, work.histogram, team);
  }
  bool is_few = few.count <= FEW;
  Found t;
  if (is_few) {
    t = threshold_of_few(few, params, k, team);
  } else {
    t = Found{threshold_of_many(x, bottom, params, k, work, team), 0ul};
  }
  bool known = is_few && params.temperature_first;
  if (params.min_p > 0.0f) {
    float least = d.ref + metal::log(params.min_p) / x.density.inv_t;
    known = known && least <= t.z;
    t.z = metal::max(t.z, least);
  }
  if (t.z > -INFINITY) {
    x.density = d;
    d.threshold = t.z;
    ulong kept = t.mass;
    if (!known) {
      kept = is_few ? total_of_few(few, d, t.z, work.sums, team)
                    : total_weight(x, t.z, work.sums, team);
    }
    d.scale /= from_fixed_point(kept);
  }
  d.few = is_few ? few.count : -1;
  return d;
}
