// One row of logits and its sums.
#pragma once

#include "params.h"
#include "prelude.h"

constant constexpr float LOWEST = -3.402823466e+38f;
constant constexpr int NO_ID = 2147483647;

// A simdgroup reads 256 logits at once, 8 a lane.
constant constexpr int GROUP = 256;
constant constexpr int BATCH = 4; // of these, in flight together

template <typename T>
struct Row {
  const device T* logits;
  const device uint* allowed;
  int size;
  bool aligned;
  bool masked; // by `allowed`: other logits read as -inf
};

struct Eight {
  float z[8];
};

METAL_FUNC float low_half(uint w, half) {
  return float(as_type<half>(ushort(w & 0xffffu)));
}

METAL_FUNC float high_half(uint w, half) {
  return float(as_type<half>(ushort(w >> 16)));
}

METAL_FUNC float low_half(uint w, bfloat) {
  return as_type<float>(w << 16);
}

METAL_FUNC float high_half(uint w, bfloat) {
  return as_type<float>(w & 0xffff0000u);
}

template <typename T>
METAL_FUNC Eight load_aligned(const device T* x) {
  uint4 w = *(const device uint4*)(x);
  T t = T(0.0f);
  return Eight{
      {low_half(w.x, t),
       high_half(w.x, t),
       low_half(w.y, t),
       high_half(w.y, t),
       low_half(w.z, t),
       high_half(w.z, t),
       low_half(w.w, t),
       high_half(w.w, t)}};
}

METAL_FUNC Eight load_aligned(const device float* x) {
  float4 a = *(const device float4*)(x);
  float4 b = *(const device float4*)(x + 4);
  return Eight{{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

// Whether all logits before `end` can be read as they lie in memory.
template <typename T>
METAL_FUNC bool is_plain(Row<T> row, int end) {
  return row.aligned && !row.masked && end <= row.size;
}

// The logits from id on, a multiple of 8. Behind the end they are -inf.
template <typename T>
METAL_FUNC_SLOW Eight load_masked(Row<T> row, int id) {
  Eight out;
  if (row.aligned && id + 8 <= row.size) {
    out = load_aligned(row.logits + id);
  } else {
    for (int i = 0; i < 8; ++i) {
      out.z[i] = id + i < row.size ? float(row.logits[id + i]) : -INFINITY;
    }
  }
  if (row.masked && id < row.size) {
    uint bits = row.allowed[id / 32] >> uint(id % 32);
    for (int i = 0; i < 8; ++i) {
      out.z[i] = (bits >> uint(i)) & 1u ? out.z[i] : -INFINITY;
    }
  }
  return out;
}

template <typename T>
METAL_FUNC Eight load8(Row<T> row, int id) {
  return is_plain(row, id + 8) ? load_aligned(row.logits + id)
                               : load_masked(row, id);
}

template <typename T>
METAL_FUNC float load1(Row<T> row, int id) {
  bool masked = row.masked && !((row.allowed[id / 32] >> uint(id % 32)) & 1u);
  return masked ? -INFINITY : float(row.logits[id]);
}

// NaN or +inf, by bits: compilers may assume that neither occurs.
METAL_FUNC bool is_unusable(float z) {
  uint bits = as_type<uint>(z);
  return (bits & 0x7f800000u) == 0x7f800000u && bits != 0xff800000u;
}

METAL_FUNC Partial empty_partial() {
  return Partial{LOWEST, 0.0f, 0.0f, NO_ID};
}

constant constexpr float LOG2_E = 1.4426950408889634f;

// exp(x). Its error is below 1e-6 where the value is not too small to count.
METAL_FUNC float fast_exp(float x) {
  return metal::exp2(x * LOG2_E);
}

METAL_FUNC Partial merge(Partial a, Partial b, float inv_t) {
  float m = metal::max(a.max, b.max);
  int best = a.max == b.max ? metal::min(a.best, b.best)
      : a.max > b.max       ? a.best
                            : b.best;
  float da = a.max - m;
  float db = b.max - m;
  return Partial{
      m,
      a.sum * fast_exp(da) + b.sum * fast_exp(db),
      a.scaled_sum * fast_exp(da * inv_t) + b.scaled_sum * fast_exp(db * inv_t),
      metal::min(a.best, b.best) < 0 ? -1 : best};
}

// What the sums of a row need to know of its density: the scaled sum counts
// {z >= floor} only. Without `plain` the other sum is not wanted and only tells
// whether there is one.
struct Scaling {
  float inv_t;
  float floor;
  bool plain;
  bool greedy;
};

METAL_FUNC Scaling make_scaling(float inv_t, float floor, bool plain) {
  bool greedy = inv_t == INFINITY;
  inv_t = greedy ? 1.0f : inv_t;
  plain = plain ? inv_t != 1.0f : false;
  return Scaling{inv_t, floor, plain, greedy};
}

METAL_FUNC float max_of(Eight x) {
  float m = x.z[0];
  for (int i = 1; i < 8; ++i) {
    m = metal::max(m, x.z[i]);
  }
  return m;
}

template <int N>
struct Eights {
  Eight x[N];
};

// With N times 8 more logits, of which the first are those of ids `id`, then
// `id + step`, ... The best id is that of the first of 8. The sums are NaN if a
// logit is NaN or +inf.
template <int N>
METAL_FUNC Partial
add(Partial a, Eights<N> some, int id, int step, Scaling scaling) {
  float m = max_of(some.x[0]);
  int first = id;
  for (int j = 1; j < N; ++j) {
    float next = max_of(some.x[j]);
    first = next > m ? id + j * step : first;
    m = metal::max(m, next);
  }
  if (m > a.max || (m == a.max && a.best == NO_ID)) {
    a.best = first;
    a.sum *= fast_exp(a.max - m);
    a.scaled_sum *= fast_exp((a.max - m) * scaling.inv_t);
    a.max = m;
  }
  float factor = scaling.inv_t * LOG2_E;
  if (scaling.plain) {
    for (int i = 0; i < 8 * N; ++i) {
      float d = some.x[i / 8].z[i % 8] - a.max;
      a.sum += fast_exp(d);
      a.scaled_sum += metal::exp2(d * factor);
    }
    return a;
  }
  if (scaling.floor > -INFINITY) {
    for (int i = 0; i < 8 * N; ++i) {
      float z = some.x[i / 8].z[i % 8];
      float e = metal::exp2((z - a.max) * factor);
      a.scaled_sum += z < scaling.floor ? 0.0f : e;
    }
  } else {
    for (int i = 0; i < 8 * N; ++i) {
      a.scaled_sum += metal::exp2((some.x[i / 8].z[i % 8] - a.max) * factor);
    }
  }
  a.sum = a.scaled_sum;
  return a;
}

METAL_FUNC Partial simd_merge(Partial a, float inv_t) {
  float m = simd_max(a.max);
  float d = a.max - m;
  int best = a.best < 0 || a.max == m ? a.best : NO_ID;
  return Partial{
      m,
      simd_sum(a.sum * fast_exp(d)),
      simd_sum(a.scaled_sum * fast_exp(d * inv_t)),
      simd_min(best)};
}

// The partials of a row. Each lane has read its first two.
struct Partials {
  const device Partial* all;
  int count;
  Partial first;
  Partial second;
};

METAL_FUNC Partial load_partial(const device Partial* x, int i, int count) {
  Partial a = empty_partial();
  if (i < count) {
    a = x[i];
  }
  return a;
}

METAL_FUNC Partials
read_partials(const device Partial* all, int count, uint lane) {
  Partial first = load_partial(all, int(lane), count);
  return Partials{all, count, first, load_partial(all, int(lane) + 32, count)};
}

// The sums of a whole row, in every lane of a simdgroup.
METAL_FUNC Partial combine(Partials x, float inv_t, uint lane) {
  Partial a = merge(x.first, x.second, inv_t);
#pragma unroll 1
  for (int i = int(lane) + 64; i < x.count; i += 32) {
    a = merge(a, x.all[i], inv_t);
  }
  return simd_merge(a, inv_t);
}

// The first of 8 logits from id on that is the maximum of its row.
template <typename T>
METAL_FUNC int find_best(Row<T> row, int id, float max) {
  Eight x = load8(row, id);
  int best = id;
  for (int i = 7; i > 0; --i) {
    best = x.z[i] == max ? id + i : best;
  }
  return x.z[0] == max ? id : best;
}

// What one simdgroup reads of the logits [begin, end), a chunk of a row.
template <typename T>
struct Share {
  Row<T> row;
  int begin; // of the first group
  int end;
  int step; // between its groups
};

template <typename T>
METAL_FUNC Share<T> share_of(Row<T> row, int chunk, int size, Team team) {
  int begin = chunk * size;
  return Share<T>{
      row,
      begin + int(team.simdgroup) * GROUP,
      metal::min(begin + size, row.size),
      int(team.simdgroups) * GROUP};
}

// The sums of one lane, whose first id is `begin`, without the logits that are
// NaN or +inf, which make the best id -1.
template <typename T>
METAL_FUNC_SLOW Partial sum_usable(Share<T> share, int begin, Scaling scaling) {
  Partial a = empty_partial();
  for (int id = begin; id < share.end; id += share.step) {
    Eights<1> some = {{load_masked(share.row, id)}};
    for (int i = 0; i < 8; ++i) {
      float z = some.x[0].z[i];
      some.x[0].z[i] = is_unusable(z) ? -INFINITY : z;
    }
    a = add(a, some, id, share.step, scaling);
  }
  a.best = -1;
  return a;
}

// BATCH times 8 logits of a lane. Behind the end they are -inf.
template <typename T>
METAL_FUNC Eights<BATCH> load_batch(Share<T> share, int base, uint lane) {
  Row<T> row = share.row;
  Eights<BATCH> some;
  int last = base + share.step * (BATCH - 1) + GROUP;
  if (last <= share.end && is_plain(row, last)) {
    // All are read before one is used.
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      int id = base + j * share.step + int(lane) * 8;
      some.x[j] = load_aligned(row.logits + id);
    }
  } else {
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      int first = base + j * share.step;
      int id = first < share.end ? first + int(lane) * 8 : row.size;
      some.x[j] = load_masked(row, id);
    }
  }
  return some;
}

// The sums of one chunk and, if `maxima` is wanted, the maximum of each of its
// groups. `some` is the first batch of the share. `scratch` has one record a
// simdgroup.
template <typename T>
METAL_FUNC void reduce_chunk(
    Share<T> share,
    Eights<BATCH> some,
    Scaling scaling,
    bool want_maxima,
    device float* maxima,
    device Partial* out,
    threadgroup Partial* scratch,
    Team team) {
  Partial a = empty_partial();
  int base = share.begin;
  int lane = int(team.lane) * 8;
  while (base < share.end) {
    a = add(a, some, base + lane, share.step, scaling);
    if (want_maxima) {
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        int first = base + j * share.step;
        float m = simd_max(max_of(some.x[j]));
        if (team.lane == 0 && first < share.end) {
          maxima[first / GROUP] = m;
        }
      }
    }
    base += share.step * BATCH;
    if (base < share.end) {
      some = load_batch(share, base, team.lane);
    }
  }
  if (is_unusable(a.scaled_sum)) {
    a = sum_usable(share, share.begin + lane, scaling);
  }
  a = simd_merge(a, scaling.inv_t);
  if (team.lane == 0) {
    scratch[team.simdgroup] = a;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (team.simdgroup == 0) {
    Partial each = empty_partial();
    if (team.lane < team.simdgroups) {
      each = scratch[team.lane];
    }
    a = simd_merge(each, scaling.inv_t);
    if (team.lane == 0) {
      bool known = scaling.greedy && a.best >= 0 && a.best != NO_ID;
      a.best = known ? find_best(share.row, a.best, a.max) : a.best;
      *out = a;
    }
  }
}
