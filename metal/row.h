// One row of logits and its sums.
#pragma once

#include "params.h"
#include "prelude.h"

constant constexpr float LOWEST = -3.402823466e+38f;
constant constexpr int NO_ID = 2147483647;

// A simdgroup reads 256 logits at once, 8 a lane.
constant constexpr int GROUP = 256;

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

// The logits from id on, a multiple of 8. Behind the end they are -inf.
template <typename T>
METAL_FUNC Eight load8(Row<T> row, int id) {
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

METAL_FUNC Partial merge(Partial a, Partial b, float inv_t) {
  float m = metal::max(a.max, b.max);
  int best = a.max == b.max ? metal::min(a.best, b.best)
      : a.max > b.max       ? a.best
                            : b.best;
  float da = a.max - m;
  float db = b.max - m;
  return Partial{
      m,
      a.sum * metal::exp(da) + b.sum * metal::exp(db),
      a.scaled_sum * metal::exp(da * inv_t) +
          b.scaled_sum * metal::exp(db * inv_t),
      metal::min(a.best, b.best) < 0 ? -1 : best};
}

// What the sums of a row need to know of its density: the scaled sum counts
// {z >= floor} only.
struct Scaling {
  float inv_t;
  float floor;
};

METAL_FUNC Partial merge(Partial a, Eight x, int id, Scaling scaling) {
  Partial b = a;
  bool usable = true;
  for (int i = 0; i < 8; ++i) {
    if (is_unusable(x.z[i])) {
      usable = false;
      x.z[i] = -INFINITY;
    }
    if (x.z[i] > b.max || (x.z[i] == b.max && b.best == NO_ID)) {
      b.max = x.z[i];
      b.best = id + i;
    }
  }
  b.best = usable && a.best >= 0 ? b.best : -1;
  b.sum *= metal::exp(a.max - b.max);
  for (int i = 0; i < 8; ++i) {
    b.sum += metal::exp(x.z[i] - b.max);
  }
  if (scaling.inv_t == 1.0f && scaling.floor == -INFINITY) {
    b.scaled_sum = b.sum;
    return b;
  }
  b.scaled_sum *= metal::exp((a.max - b.max) * scaling.inv_t);
  for (int i = 0; i < 8; ++i) {
    float e = metal::exp((x.z[i] - b.max) * scaling.inv_t);
    b.scaled_sum += x.z[i] >= scaling.floor ? e : 0.0f;
  }
  return b;
}

METAL_FUNC Partial simd_merge(Partial a, float inv_t) {
  float m = simd_max(a.max);
  float d = a.max - m;
  int lowest = simd_min(a.best);
  int best = simd_min(a.max == m ? a.best : NO_ID);
  return Partial{
      m,
      simd_sum(a.sum * metal::exp(d)),
      simd_sum(a.scaled_sum * metal::exp(d * inv_t)),
      lowest < 0 ? -1 : best};
}

// The sums of a whole row, in every lane of a simdgroup.
METAL_FUNC Partial
combine(const device Partial* partials, int chunks, float inv_t, uint lane) {
  Partial a = empty_partial();
  for (int i = int(lane); i < chunks; i += 32) {
    a = merge(a, partials[i], inv_t);
  }
  return simd_merge(a, inv_t);
}

// The sums of one chunk and, if `maxima` is wanted, the maximum of each of its
// groups. `scratch` has one record a simdgroup.
template <typename T>
METAL_FUNC void reduce_chunk(
    Row<T> row,
    int begin,
    int end,
    Scaling scaling,
    bool want_maxima,
    device float* maxima,
    device Partial* out,
    threadgroup Partial* scratch,
    Team team) {
  Partial a = empty_partial();
  int step = int(team.simdgroups) * GROUP;
  for (int base = begin + int(team.simdgroup) * GROUP; base < end;
       base += step) {
    int id = base + int(team.lane) * 8;
    Eight x = load8(row, id);
    a = merge(a, x, id, scaling);
    if (want_maxima) {
      float m = x.z[0];
      for (int i = 1; i < 8; ++i) {
        m = metal::max(m, x.z[i]);
      }
      m = simd_max(m);
      if (team.lane == 0) {
        maxima[base / GROUP] = m;
      }
    }
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
      *out = a;
    }
  }
}
