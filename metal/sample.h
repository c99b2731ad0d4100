// One token a row. First dispatch: the sums of every chunk of every row.
// Second: one threadgroup a row finds the thresholds of the filters and draws.
#pragma once

#include "draw.h"
#include "threshold.h"

template <typename T>
METAL_FUNC Row<T> sample_row(
    const device T* logits,
    const device uint* allowed,
    constant SampleParams& params,
    uint r) {
  return Row<T>{
      logits + long(r) * params.logits_stride,
      allowed + long(r) * params.allowed_stride,
      params.vocab,
      params.aligned != 0,
      params.has_allowed != 0};
}

template <typename T>
kernel void sample_partials(
    const device T* logits [[buffer(0)]],
    const device float* temperature [[buffer(2)]],
    const device uint* allowed [[buffer(6)]],
    device Partial* partials [[buffer(7)]],
    device float* maxima [[buffer(8)]],
    constant SampleParams& params [[buffer(11)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  TG_ARRAY(Partial, scratch, 32);
  uint r = position.x;
  int chunk = int(position.y);
  Team team = make_team(thread_index, threads.x);
  Share<T> share = share_of(
      sample_row(logits, allowed, params, r), chunk, params.chunk, team);
  // Read before what waits for the temperature.
  Eights<BATCH> some = load_batch(share, share.begin, team.lane);
  int b = int(r) / params.rows_per_param;
  float inv_t = inverse_temperature(temperature[b * params.temperature_stride]);
  reduce_chunk(
      share,
      some,
      make_scaling(inv_t, -INFINITY, true),
      params.filtered != 0,
      maxima + long(r) * params.groups,
      partials + long(r) * params.chunks + chunk,
      scratch,
      team);
}

METAL_FUNC void write_stats(Density d, device float* stats) {
  if (d.usable == 0) {
    stats[0] = stats[1] = stats[2] = as_type<float>(0x7fc00000u);
  } else if (d.point >= 0) {
    stats[0] = 0.0f;
    stats[1] = d.ref;
    stats[2] = INFINITY;
  } else {
    stats[0] = metal::fma(d.ref, d.inv_t, -metal::log(d.scale));
    stats[1] = d.threshold;
    stats[2] = d.inv_t;
  }
}

template <typename T, bool FILTERED>
kernel void sample_draw(
    const device T* logits [[buffer(0)]],
    const device float* uniforms [[buffer(1)]],
    const device float* temperature [[buffer(2)]],
    const device float* top_k [[buffer(3)]],
    const device float* top_p [[buffer(4)]],
    const device float* min_p [[buffer(5)]],
    const device uint* allowed [[buffer(6)]],
    const device Partial* partials [[buffer(7)]],
    const device float* maxima [[buffer(8)]],
    device int* tokens [[buffer(9)]],
    device float* stats [[buffer(10)]],
    constant SampleParams& params [[buffer(11)]],
    uint r [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  TG_ARRAY(atomic_uint, histogram, 2 * BINS);
  TG_ARRAY(ulong, sums, 32);
  TG_ARRAY(int, ids, FEW);
  TG_ARRAY(float, candidates, FEW);
  TG_ARRAY(ulong, weights, FEW);
  TG_ARRAY(atomic_uint, shared, 8);
  TG_ARRAY(int, result, 1);
  Team team = make_team(thread_index, threads);
  Row<T> row = sample_row(logits, allowed, params, r);
  int b = int(r) / params.rows_per_param;
  Sampling sampling = {
      temperature[b * params.temperature_stride],
      top_k[b * params.top_k_stride],
      top_p[b * params.top_p_stride],
      min_p[b * params.min_p_stride],
      params.temperature_first != 0};
  partials += long(r) * params.chunks;
  maxima += long(r) * params.groups;
  const device float* pair = uniforms + long(r) * params.uniforms_stride;
  ulong u = fine_uniform(pair[0], pair[1]);

  float inv_t = inverse_temperature(sampling.temperature);
  Partial whole = combine(
      read_partials(partials, params.chunks, team.lane),
      finite_inverse(inv_t),
      team.lane);
  Density d = make_density(whole, inv_t, -INFINITY);
  if (FILTERED) {
    Maxima groups = {maxima, params.groups};
    Few none = {ids, candidates, weights, shared, FEW + 1};
    Workspace work = {histogram, sums, none};
    d = apply_filters(row, groups, whole, sampling, work, team);
  }
  int token = -1;
  if (d.usable != 0 && d.point >= 0) {
    token = d.point;
  } else if (d.usable != 0) {
    Weights<T, FILTERED> x = {row, row, d, d, false, maxima};
    if (!FILTERED) {
      PartialWeights chunks = {partials, d};
      token = draw_by_chunks(
          x, chunks, params.chunks, params.chunk, u, sums, result, team);
    } else if (d.few >= 0) {
      token = draw_few(x, ids, candidates, weights, d.few, u, result, team);
    } else {
      token = draw_row(x, u, sums, result, team);
    }
  }
  if (team.thread_index == 0) {
    tokens[r] = token;
    write_stats(d, stats + 3l * long(r));
  }
}
