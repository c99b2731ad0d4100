// Draws by inverse CDF in id order.
#pragma once

#include "density.h"
#include "fixed_point.h"

// What is drawn from: max(p - q, 0), or p alone.
template <typename T, bool FILTERED>
struct Weights {
  Row<T> target;
  Row<T> draft;
  Density p;
  Density q;
  bool residual;
  // With filters: the maximum of each group. Groups below the threshold are not
  // read.
  const device float* maxima;
};

struct EightWeights {
  ulong w[8];
  ulong sum;
};

template <typename T, bool FILTERED>
METAL_FUNC EightWeights weights8(Weights<T, FILTERED> x, int id) {
  bool spread = x.residual && x.q.point < 0;
  Eight z;
  Eight y;
  if (is_plain(x.target, id + 8)) {
    // Both at once, without a branch between them.
    const device T* draft = spread ? x.draft.logits : x.target.logits;
    z = load_aligned(x.target.logits + id);
    y = load_aligned(draft + id);
  } else {
    z = load_masked(x.target, id);
    y = z;
    if (spread) {
      y = load_masked(x.draft, id);
    }
  }
  // Exact by a power of 2: the differences are those of probabilities.
  x.p.scale *= UNITS;
  x.q.scale *= UNITS;
  float p[8];
  for (int i = 0; i < 8; ++i) {
    p[i] = spread_probability(x.p, z.z[i]);
  }
  if (spread) {
    for (int i = 0; i < 8; ++i) {
      p[i] = metal::max(p[i] - spread_probability(x.q, y.z[i]), 0.0f);
    }
  } else if (x.residual) {
    for (int i = 0; i < 8; ++i) {
      p[i] = id + i == x.q.point ? 0.0f : p[i];
    }
  }
  EightWeights out;
  out.sum = 0;
  for (int i = 0; i < 8; ++i) {
    out.w[i] = ulong(p[i]);
    out.sum += out.w[i];
  }
  return out;
}

// The first of the groups of [begin, end) that a simdgroup works on.
METAL_FUNC int first_group(int begin, int end, uint simdgroup, Team team) {
  int all = int(team.simdgroups);
  int each = (end - begin + all - 1) / all;
  return metal::min(begin + int(simdgroup) * each, end);
}

// Which of the 32 groups from `first` on can have a weight.
template <typename T, bool FILTERED>
METAL_FUNC uint
hot_groups(Weights<T, FILTERED> x, int first, int end, uint lane) {
  int group = first + int(lane);
  return lanes_where(
      group < end && (!FILTERED || x.maxima[group] >= x.p.threshold));
}

// The weights of the shares of the simdgroups: in lane i that of simdgroup i
// and of all up to it, in every lane that of all.
struct Shares {
  ulong mine;
  ulong prefix;
  ulong total;
};

// From the sum of every lane. `sums` has one value a simdgroup.
METAL_FUNC Shares gather_shares(ulong sum, threadgroup ulong* sums, Team team) {
  sum = simd_total(sum);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (team.lane == 0) {
    sums[team.simdgroup] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Shares shares;
  shares.mine = team.lane < team.simdgroups ? sums[team.lane] : 0ul;
  shares.prefix = simd_prefix(shares.mine, team.lane);
  shares.total = shuffle(shares.prefix, 31);
  return shares;
}

// Of the groups [begin, end).

template <typename T, bool FILTERED>
METAL_FUNC Shares sum_groups(
    Weights<T, FILTERED> x,
    int begin,
    int end,
    threadgroup ulong* sums,
    Team team) {
  ulong sum = 0;
  int last = first_group(begin, end, team.simdgroup + 1, team);
  for (int first = first_group(begin, end, team.simdgroup, team); first < last;
       first += 32) {
    uint hot = hot_groups(x, first, last, team.lane);
    for (; hot != 0; hot &= hot - 1u) {
      int group = first + int(metal::ctz(hot));
      sum += weights8(x, group * GROUP + int(team.lane) * 8).sum;
    }
  }
  return gather_shares(sum, sums, team);
}

// The id of the 8 of every lane where the running sum passes `threshold`, or
// the last one with a weight. In every lane.
METAL_FUNC int
find_in_group(EightWeights w, int id, ulong threshold, uint lane) {
  Pick found = pick(w.sum, simd_prefix(w.sum, lane), threshold);
  ulong sum = 0;
  int last = -1;
  bool passed = false;
  for (int i = 0; i < 8; ++i) {
    sum += w.w[i];
    last = !passed && w.w[i] > 0 ? id + i : last;
    passed = passed || sum > found.rest;
  }
  return simd_shuffle(last, ushort(metal::max(found.lane, 0)));
}

// The id in the groups [begin, end) where the running sum passes `threshold`,
// or the last one with a weight, -1 if there is none. By one simdgroup, in
// every lane.
template <typename T, bool FILTERED>
METAL_FUNC int find_in_groups(
    Weights<T, FILTERED> x,
    int begin,
    int end,
    ulong threshold,
    uint lane) {
  EightWeights w = {};
  int id = -1;
  bool passed = false;
  for (int first = begin; first < end && !passed; first += 32) {
    uint hot = hot_groups(x, first, end, lane);
    for (; hot != 0 && !passed; hot &= hot - 1u) {
      int next = (first + int(metal::ctz(hot))) * GROUP + int(lane) * 8;
      EightWeights candidate = weights8(x, next);
      ulong sum = simd_total(candidate.sum);
      if (sum > 0) {
        w = candidate;
        id = next;
        passed = sum > threshold;
        threshold -= passed ? 0ul : sum;
      }
    }
  }
  return find_in_group(w, id, passed ? threshold : TAKE_LAST, lane);
}

// The same by the whole threadgroup, in every thread; after sum_groups() with a
// total that is not 0.
template <typename T, bool FILTERED>
METAL_FUNC int find_id(
    Weights<T, FILTERED> x,
    int begin,
    int end,
    ulong threshold,
    Shares shares,
    threadgroup int* result,
    Team team) {
  Pick owner = pick(shares.mine, shares.prefix, threshold);
  if (int(team.simdgroup) == owner.lane) {
    int first = first_group(begin, end, team.simdgroup, team);
    int last = first_group(begin, end, team.simdgroup + 1, team);
    int id = find_in_groups(x, first, last, owner.rest, team.lane);
    if (team.lane == 0) {
      *result = id;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return *result;
}

// Weights of the chunks of a row from their sums. These are rounded, so that a
// threshold can lie a little behind the end of its chunk.
struct PartialWeights {
  const device Partial* partials;
  Density density;
};

METAL_FUNC ulong chunk_weight(PartialWeights x, int chunk) {
  Partial a = x.partials[chunk];
  Density d = x.density;
  return fixed_point(
      a.scaled_sum * metal::exp((a.max - d.ref) * d.inv_t) * d.scale);
}

// The chunk at quantile u and what is left of the threshold there, -1 if all
// weights are 0. Every lane sums a share, and the search goes on in one share.
METAL_FUNC Pick pick_chunk(PartialWeights x, int chunks, ulong u, uint lane) {
  int begin = 0;
  int end = chunks;
  ulong threshold = 0;
#pragma unroll 1
  for (bool first = true; first || end - begin > 1; first = false) {
    int each = (end - begin + 31) / 32;
    int mine = metal::min(begin + int(lane) * each, end);
    int last = metal::min(mine + each, end);
    ulong sum = 0;
#pragma unroll 4
    for (int i = mine; i < last; ++i) {
      sum += chunk_weight(x, i);
    }
    ulong prefix = simd_prefix(sum, lane);
    if (first) {
      threshold = scale_by(shuffle(prefix, 31), u);
    }
    Pick found = pick(sum, prefix, threshold);
    if (found.lane < 0) {
      return Pick{-1, 0ul};
    }
    begin += found.lane * each;
    end = metal::min(begin + each, end);
    threshold = found.rest;
  }
  return Pick{begin, threshold};
}

// Instead of a group: no group has a weight; another simdgroup has it.
constant constexpr int NOWHERE = -1;
constant constexpr int ELSEWHERE = -2;

// The group at quantile u and what is left of the threshold there, in one
// simdgroup.
METAL_FUNC Pick pick_group(
    const device ulong* weights,
    int groups,
    ulong u,
    threadgroup ulong* sums,
    Team team) {
  int each = (groups + int(team.threads) - 1) / int(team.threads);
  int begin = metal::min(int(team.thread_index) * each, groups);
  int end = metal::min(begin + each, groups);
  ulong sum = 0;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    sum += weights[i];
  }
  ulong prefix = simd_prefix(sum, team.lane);
  if (team.lane == 31) {
    sums[team.simdgroup] = prefix;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong mine = team.lane < team.simdgroups ? sums[team.lane] : 0ul;
  ulong all = simd_prefix(mine, team.lane);
  Pick owner = pick(mine, all, scale_by(shuffle(all, 31), u));
  if (owner.lane != int(team.simdgroup)) {
    return Pick{owner.lane < 0 ? NOWHERE : ELSEWHERE, 0ul};
  }
  Pick found = pick(sum, prefix, owner.rest);
  begin = simd_shuffle(begin, ushort(found.lane));
  end = metal::min(begin + each, groups);
  Pick group = {begin, found.rest};
  for (int i = begin; i + 1 < end && weights[i] <= found.rest; ++i) {
    found.rest -= weights[i];
    if (weights[i + 1] > 0) {
      group = Pick{i + 1, found.rest};
    }
  }
  return group;
}

// The id at quantile u of the weights of a row, -1 if they are all 0.
template <typename T, bool FILTERED>
METAL_FUNC_SLOW int draw_row(
    Weights<T, FILTERED> x,
    ulong u,
    threadgroup ulong* sums,
    threadgroup int* result,
    Team team) {
  int end = (x.target.size + GROUP - 1) / GROUP;
  Shares shares = sum_groups(x, 0, end, sums, team);
  if (shares.total == 0) {
    return -1;
  }
  ulong threshold = scale_by(shares.total, u);
  return find_id(x, 0, end, threshold, shares, result, team);
}

// The same where the weights of the chunks are known: only one is read.
template <typename T, bool FILTERED>
METAL_FUNC int draw_by_chunks(
    Weights<T, FILTERED> x,
    PartialWeights chunks,
    int count,
    int size,
    ulong u,
    threadgroup ulong* sums,
    threadgroup int* result,
    Team team) {
  Pick found = pick_chunk(chunks, count, u, team.lane);
  int begin = metal::max(found.lane, 0) * (size / GROUP);
  int end = (x.target.size + GROUP - 1) / GROUP;
  end = found.lane < 0 ? begin : metal::min(begin + size / GROUP, end);
  Shares shares = sum_groups(x, begin, end, sums, team);
  if (shares.total == 0) {
    return -1;
  }
  return find_id(x, begin, end, found.rest, shares, result, team);
}

// The same over candidates in any order, of which every thread has the ids and
// logits that its index and the number of threads give.
template <typename T, bool FILTERED>
METAL_FUNC int draw_few(
    Weights<T, FILTERED> x,
    threadgroup int* ids,
    threadgroup float* z,
    threadgroup ulong* weights,
    int count,
    ulong u,
    threadgroup int* result,
    Team team) {
  for (int i = int(team.thread_index); i < count; i += int(team.threads)) {
    float p = spread_probability(x.p, z[i]);
    if (x.residual) {
      float y = x.q.point < 0 ? load1(x.draft, ids[i]) : 0.0f;
      p = metal::max(p - probability(x.q, ids[i], y), 0.0f);
    }
    weights[i] = fixed_point(p);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong total = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    int i = first + int(team.lane);
    total += simd_total(i < count ? weights[i] : 0ul);
  }
  if (total == 0) {
    return -1;
  }
  // A uniform of 1 takes the last one.
  ulong threshold = metal::min(scale_by(total, u), total - 1ul);
  for (int i = int(team.thread_index); i < count; i += int(team.threads)) {
    int id = ids[i];
    ulong before = 0;
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      before += ids[j] < id ? weights[j] : 0ul;
    }
    if (before <= threshold && threshold < before + weights[i]) {
      *result = id;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return *result;
}
