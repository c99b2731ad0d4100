// The Gated DeltaNet recurrence. One simdgroup owns one value row of a head,
// spread over its lanes: the state is read once, stays in registers, and is
// written once.
#pragma once

#include "params.h"
#include "prelude.h"

template <typename T, int KEY_DIM>
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
  constexpr int N = KEY_DIM / 32;
  Team team = make_team(thread_index, threads.x);
  int h = int(position.y);
  int b = int(position.z);
  int row = int(position.x * team.simdgroups + team.simdgroup);
  if (row >= params.value_dim) {
    return;
  }
  int hk = h / (params.value_heads / params.key_heads);
  k += long(b) * params.k_strides[0] + long(hk) * params.k_strides[2];
  v += long(b) * params.v_strides[0] + long(h) * params.v_strides[2] + row;
  g += long(b) * params.g_strides[0] + long(h) * params.g_strides[2];
  beta += long(b) * params.beta_strides[0] + long(h) * params.beta_strides[2];
  q += long(b) * params.q_strides[0] + long(hk) * params.q_strides[2];
  long at = (long(b) * params.value_heads + h) * params.value_dim + row;
  state += at * params.key_dim;
  out += at * params.key_dim;
  y += (long(b) * params.steps * params.value_heads + h) * params.value_dim +
      row;

  float s[N];
  for (int j = 0; j < N; ++j) {
    int i = j * 32 + int(team.lane);
    s[j] = i < params.key_dim ? state[i] : 0.0f;
  }
  int n = metal::clamp(steps[long(b) * params.steps_stride], 0, params.steps);
  for (int t = 0; t < n; ++t) {
    float key[N];
    float decay = g[long(t) * params.g_strides[1]];
    float dot = 0.0f;
    for (int j = 0; j < N; ++j) {
      int i = j * 32 + int(team.lane);
      bool in = i < params.key_dim;
      key[j] = in ? float(k[long(t) * params.k_strides[1] + i]) : 0.0f;
      s[j] = in ? s[j] * decay : 0.0f;
      dot += s[j] * key[j];
    }
    float delta = (float(v[long(t) * params.v_strides[1]]) - simd_sum(dot)) *
        beta[long(t) * params.beta_strides[1]];
    float read = 0.0f;
    for (int j = 0; j < N; ++j) {
      int i = j * 32 + int(team.lane);
      bool in = i < params.key_dim;
      s[j] = in ? s[j] + key[j] * delta : 0.0f;
      if (params.has_q != 0 && in) {
        read += s[j] * float(q[long(t) * params.q_strides[1] + i]);
      }
    }
    if (params.has_q != 0) {
      read = simd_sum(read);
      if (team.lane == 0) {
        y[long(t) * params.value_heads * params.value_dim] = T(read);
      }
    }
  }
  for (int j = 0; j < N; ++j) {
    int i = j * 32 + int(team.lane);
    if (i < params.key_dim) {
      out[i] = s[j];
    }
  }
  if (params.has_q != 0 && team.lane == 0) {
    for (int t = n; t < params.steps; ++t) {
      y[long(t) * params.value_heads * params.value_dim] = T(0.0f);
    }
  }
}
