// The small functions of the kernels, one call a thread or simdgroup.
#include "fixed_point.h"
#include "threshold.h"

template <typename T>
kernel void units_scale_by(
    const device ulong* total [[buffer(0)]],
    const device ulong* u [[buffer(1)]],
    device ulong* out [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  out[i] = scale_by(total[i], u[i]);
}

template <typename T>
kernel void units_fine_uniform(
    const device float* high [[buffer(0)]],
    const device float* low [[buffer(1)]],
    device ulong* out [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  out[i] = fine_uniform(high[i], low[i]);
}

template <typename T>
kernel void units_pick(
    const device ulong* weights [[buffer(0)]],
    const device ulong* thresholds [[buffer(1)]],
    device int* lanes [[buffer(2)]],
    device ulong* rests [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  ulong sum = simd_prefix(weights[i], i % 32);
  Pick found = pick(weights[i], sum, thresholds[i / 32]);
  lanes[i] = found.lane;
  rests[i] = found.rest;
}

template <typename T>
kernel void units_keys(
    const device float* z [[buffer(0)]],
    device uint* keys [[buffer(1)]],
    device float* back [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  uint spare = spare_bits(T(0.0f));
  keys[i] = to_key(z[i], spare);
  back[i] = from_key(keys[i], spare);
}

// clang-format off
instantiate_kernel("units_scale_by", units_scale_by, float)
instantiate_kernel("units_fine_uniform", units_fine_uniform, float)
instantiate_kernel("units_pick", units_pick, float)
instantiate_kernel("units_keys_float32", units_keys, float)
instantiate_kernel("units_keys_float16", units_keys, half)
instantiate_kernel("units_keys_bfloat16", units_keys, bfloat) // clang-format on
