// The Gated DeltaNet recurrence. 8 lanes own ROWS value rows of a head, which
// share the keys that they read: the state is read once, stays in registers,
// and is written once.
#pragma once

#include "params.h"
#include "row.h"

constant constexpr int ROW_LANES = 8;
constant constexpr int SPAN = 4 * ROW_LANES; // values that they read at once

struct Four {
  float x[4];
};

METAL_FUNC Four load_four(const device float* x) {
  float4 w = *(const device float4*)(x);
  return Four{{w.x, w.y, w.z, w.w}};
}

template <typename T>
METAL_FUNC Four load_four(const device T* x) {
  ulong w = *(const device ulong*)(x);
  uint low = uint(w);
  uint high = uint(w >> 32);
  T t = T(0.0f);
  return Four{
      {low_half(low, t),
       high_half(low, t),
       low_half(high, t),
       high_half(high, t)}};
}

// x[i] to x[i + 3], 0 from n on.
template <bool WHOLE, typename T>
METAL_FUNC Four load_four(const device T* x, int i, int n) {
  if (WHOLE) {
    return load_four(x + i);
  }
  Four out;
  for (int c = 0; c < 4; ++c) {
    out.x[c] = i + c < n ? float(x[i + c]) : 0.0f;
  }
  return out;
}

template <bool WHOLE>
METAL_FUNC void store_four(device float* x, Four y, int i, int n) {
  if (WHOLE) {
    *(device float4*)(x + i) = float4{y.x[0], y.x[1], y.x[2], y.x[3]};
    return;
  }
  for (int c = 0; c < 4; ++c) {
    if (i + c < n) {
      x[i + c] = y.x[c];
    }
  }
}

// Over the lanes of a row.
METAL_FUNC float row_sum(float x) {
  for (ushort delta = ROW_LANES / 2; delta > 0; delta /= 2) {
    x += simd_shuffle_xor(x, delta);
  }
  return x;
}

// What one lane reads and writes: neighbouring rows of a head.
template <typename T>
struct Recurrence {
  const device float* state;
  const device T* k;
  const device T* v;
  const device float* g;
  const device float* beta;
  const device T* q;
  device float* out;
  device T* y;
  int first; // of every SPAN values the lane has 4 from here on
  int dim; // of its rows; 0 if it has none
  bool writes; // y
};

// WHOLE: all values of the rows are there, in memory that is read 4 at once.
// READS: with y, where there is a q.
template <bool WHOLE, bool READS, int N, int ROWS, typename T>
METAL_FUNC void
replay(Recurrence<T> x, int steps, constant GatedDeltaReplayParams& params) {
  int y_stride = params.value_heads * params.value_dim;
  Four s[ROWS][N];
  for (int r = 0; r < ROWS; ++r) {
    for (int j = 0; j < N; ++j) {
      s[r][j] = load_four<WHOLE>(
          x.state + r * params.key_dim, j * SPAN + x.first, x.dim);
    }
  }
  for (int t = 0; t < steps; ++t) {
    Four key[N];
    for (int j = 0; j < N; ++j) {
      key[j] = load_four<WHOLE>(x.k, j * SPAN + x.first, x.dim);
    }
    float decay = *x.g;
    float beta = *x.beta;
    for (int r = 0; r < ROWS; ++r) {
      float value = float(x.v[r]);
      float dot = 0.0f;
      for (int j = 0; j < N; ++j) {
        for (int c = 0; c < 4; ++c) {
          s[r][j].x[c] *= decay;
          dot = metal::fma(s[r][j].x[c], key[j].x[c], dot);
        }
      }
      float delta = (value - row_sum(dot)) * beta;
      for (int j = 0; j < N; ++j) {
        for (int c = 0; c < 4; ++c) {
          s[r][j].x[c] = metal::fma(key[j].x[c], delta, s[r][j].x[c]);
          // Behind the end 0, whatever the row is.
          bool in = WHOLE || j * SPAN + x.first + c < x.dim;
          s[r][j].x[c] = in ? s[r][j].x[c] : 0.0f;
        }
      }
    }
    if (READS && params.has_q != 0) {
      float read[ROWS] = {};
      for (int j = 0; j < N; ++j) {
        Four query = load_four<WHOLE>(x.q, j * SPAN + x.first, x.dim);
        for (int r = 0; r < ROWS; ++r) {
          for (int c = 0; c < 4; ++c) {
            read[r] = metal::fma(s[r][j].x[c], query.x[c], read[r]);
          }
        }
      }
      for (int r = 0; r < ROWS; ++r) {
        float sum = row_sum(read[r]);
        if (x.writes) {
          x.y[r] = T(sum);
        }
      }
      x.q += params.q_strides[1];
      x.y += y_stride;
    }
    x.k += params.k_strides[1];
    x.v += params.v_strides[1];
    x.g += params.g_strides[1];
    x.beta += params.beta_strides[1];
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int j = 0; j < N; ++j) {
      store_four<WHOLE>(
          x.out + r * params.key_dim, s[r][j], j * SPAN + x.first, x.dim);
    }
  }
  bool writes = READS && params.has_q != 0 && x.writes;
  for (int t = steps; writes && t < params.steps; ++t) {
    for (int r = 0; r < ROWS; ++r) {
      x.y[r] = T(0.0f);
    }
    x.y += y_stride;
  }
}

template <typename T>
METAL_FUNC Recurrence<T> from_row(Recurrence<T> x, int row, int key_dim) {
  x.state += row * key_dim;
  x.v += row;
  x.out += row * key_dim;
  x.y += row;
  return x;
}

template <typename T, int KEY_DIM, int ROWS>
kernel void gated_delta_replay(
    const device float* state [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device float* g [[buffer(3)]],
    const device float* beta [[buffer(4)]],
    const device int* steps [[buffer(5)]],
    const device T* q [[buffer(6)]],
    device float* out [[buffer(7)]],
    device T* y [[buffer(8)]],
    constant GatedDeltaReplayParams& params [[buffer(9)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  Team team = make_team(thread_index, threads.x);
  int h = int(position.y);
  int b = int(position.z);
  int simdgroup = int(position.x * team.simdgroups + team.simdgroup);
  int row = ROWS * (simdgroup * (32 / ROW_LANES) + int(team.lane) / ROW_LANES);
  int first = 4 * (int(team.lane) % ROW_LANES);
  int hk = h / (params.value_heads / params.key_heads);
  long head = (long(b) * params.value_heads + h) * params.value_dim;
  long start = long(b) * params.steps * params.value_heads + h;
  Recurrence<T> x = {
      state + head * params.key_dim,
      k + long(b) * params.k_strides[0] + long(hk) * params.k_strides[2],
      v + long(b) * params.v_strides[0] + long(h) * params.v_strides[2],
      g + long(b) * params.g_strides[0] + long(h) * params.g_strides[2],
      beta + long(b) * params.beta_strides[0] +
          long(h) * params.beta_strides[2],
      q + long(b) * params.q_strides[0] + long(hk) * params.q_strides[2],
      out + head * params.key_dim,
      y + start * params.value_dim,
      first,
      params.key_dim,
      first == 0};
  int n = metal::clamp(steps[long(b) * params.steps_stride], 0, params.steps);
  // By params alone: compilers make more of a branch that all threads take.
  bool whole = params.aligned != 0 && params.key_dim == KEY_DIM &&
      params.value_dim % (ROWS * 32 / ROW_LANES) == 0;
  if (whole && row >= params.value_dim) {
    return; // all lanes of the simdgroup
  }
  if (whole) {
    x = from_row(x, row, KEY_DIM);
    if (params.has_q != 0) {
      replay<true, true, KEY_DIM / SPAN, ROWS>(x, n, params);
    } else {
      replay<true, false, KEY_DIM / SPAN, ROWS>(x, n, params);
    }
    return;
  }
  for (int r = 0; r < ROWS; ++r) {
    // A lane without a row stays, for the sums.
    bool owned = row + r < params.value_dim;
    x.dim = owned ? params.key_dim : 0;
    x.writes = owned && first == 0;
    int at = owned ? row + r : params.value_dim - 1;
    replay<false, true, KEY_DIM / SPAN, 1>(
        from_row(x, at, params.key_dim), n, params);
  }
}
