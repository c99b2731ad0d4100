// Draws by inverse CDF in id order.
#pragma once

#include "density.h"
#include "fixed_point.h"

// What is drawn from: max(p - q, 0), or p alone.
template <typename T>
struct Weights {
  Row<T> target;
  Row<T> draft;
  Density p;
  Density q;
  bool residual;
  // With filters: the maximum of each group. Groups below the threshold are not
  // read.
  bool filtered;
  const device float* maxima;
};

struct EightWeights {
  ulong w[8];
  ulong sum;
};

template <typename T>
METAL_FUNC EightWeights weights8(Weights<T> x, int id) {
  Eight z = load8(x.target, id);
  Eight y = z;
  if (x.residual && x.q.point < 0) {
    y = load8(x.draft, id);
  }
  EightWeights out;
  out.sum = 0;
  for (int i = 0; i < 8; ++i) {
    float p = probability(x.p, id + i, z.z[i]);
    if (x.residual) {
      p = metal::max(p - probability(x.q, id + i, y.z[i]), 0.0f);
    }
    out.w[i] = fixed_point(p);
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
template <typename T>
METAL_FUNC uint hot_groups(Weights<T> x, int first, int end, uint lane) {
  int group = first + int(lane);
  return lanes_where(
      group < end && (!x.filtered || x.maxima[group] >= x.p.threshold));
}

// The weight of the groups [begin, end), in every thread. `sums` has one value
// a simdgroup and keeps the weight of its share for find_id().
template <typename T>
METAL_FUNC ulong sum_groups(
    Weights<T> x,
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
  sum = simd_total(sum);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (team.lane == 0) {
    sums[team.simdgroup] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_total(team.lane < team.simdgroups ? sums[team.lane] : 0ul);
}

// The id in a group where the running sum passes `threshold`, in every lane.
template <typename T>
METAL_FUNC int
find_in_group(Weights<T> x, int group, ulong threshold, uint lane) {
  int id = group * GROUP + int(lane) * 8;
  EightWeights w = weights8(x, id);
  Pick found = pick(w.sum, threshold, lane);
  ulong rest = found.rest;
  int last = -1;
  for (int i = 0; i < 8; ++i) {
    if (w.w[i] == 0) {
      continue;
    }
    last = id + i;
    if (w.w[i] > rest) {
      break;
    }
    rest -= w.w[i];
  }
  return simd_shuffle(last, ushort(metal::max(found.lane, 0)));
}

// The id in the groups [begin, end) where the running sum passes `threshold`,
// or the last one with a weight; after sum_groups() with a sum that is not 0.
// In every thread.
template <typename T>
METAL_FUNC int find_id(
    Weights<T> x,
    int begin,
    int end,
    ulong threshold,
    threadgroup ulong* sums,
    threadgroup int* result,
    Team team) {
  ulong share = team.lane < team.simdgroups ? sums[team.lane] : 0ul;
  Pick owner = pick(share, threshold, team.lane);
  if (int(team.simdgroup) == owner.lane) {
    ulong rest = owner.rest;
    int group = -1;
    bool passed = false;
    int last = first_group(begin, end, team.simdgroup + 1, team);
    for (int first = first_group(begin, end, team.simdgroup, team);
         first < last && !passed;
         first += 32) {
      uint hot = hot_groups(x, first, last, team.lane);
      for (; hot != 0 && !passed; hot &= hot - 1u) {
        int next = first + int(metal::ctz(hot));
        int id = next * GROUP + int(team.lane) * 8;
        ulong sum = simd_total(weights8(x, id).sum);
        if (sum > 0) {
          group = next;
          passed = sum > rest;
          rest -= passed ? 0ul : sum;
        }
      }
    }
    int id = find_in_group(x, group, passed ? rest : TAKE_LAST, team.lane);
    if (team.lane == 0) {
      *result = id;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return *result;
}

// The id at quantile u of all weights, -1 if they are all 0.
template <typename T>
METAL_FUNC int draw_from_row(
    Weights<T> x,
    int groups,
    ulong u,
    threadgroup ulong* sums,
    threadgroup int* result,
    Team team) {
  ulong total = sum_groups(x, 0, groups, sums, team);
  return total == 0
      ? -1
      : find_id(x, 0, groups, scale_by(total, u), sums, result, team);
}

// Weights of the chunks of a row, as stored by an earlier dispatch ...
struct StoredWeights {
  const device ulong* sums;
};

METAL_FUNC ulong chunk_weight(StoredWeights x, int chunk) {
  return x.sums[chunk];
}

// ... or from the sums of the chunks. These are rounded, so that a threshold
// can lie a little behind the end of its chunk.
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
// weights are 0.
template <typename Chunks>
METAL_FUNC Pick pick_chunk(Chunks x, int chunks, ulong u, uint lane) {
  int each = (chunks + 31) / 32;
  int begin = metal::min(int(lane) * each, chunks);
  int end = metal::min(begin + each, chunks);
  ulong sum = 0;
  for (int i = begin; i < end; ++i) {
    sum += chunk_weight(x, i);
  }
  Pick found = pick(sum, scale_by(simd_total(sum), u), lane);
  if (found.lane < 0) {
    return Pick{-1, 0ul};
  }
  ulong rest = found.rest;
  int chunk = begin;
  for (int i = begin; i < end; ++i) {
    ulong w = chunk_weight(x, i);
    if (w > 0) {
      chunk = i;
      if (w > rest) {
        break;
      }
      rest -= w;
    }
  }
  uint from = uint(found.lane);
  return Pick{simd_shuffle(chunk, ushort(from)), shuffle(rest, from)};
}

// The same for a row whose chunks have known weights.
template <typename T, typename Chunks>
METAL_FUNC int draw_from_chunks(
    Weights<T> x,
    Chunks weights,
    int chunks,
    int chunk_size,
    ulong u,
    threadgroup ulong* sums,
    threadgroup int* result,
    Team team) {
  Pick found = pick_chunk(weights, chunks, u, team.lane);
  if (found.lane < 0) {
    return -1;
  }
  int begin = found.lane * (chunk_size / GROUP);
  int groups = (x.target.size + GROUP - 1) / GROUP;
  int end = metal::min(begin + chunk_size / GROUP, groups);
  ulong total = sum_groups(x, begin, end, sums, team);
  return total == 0 ? -1
                    : find_id(x, begin, end, found.rest, sums, result, team);
}
