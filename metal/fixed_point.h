// Probabilities as integers in units of 2^-60. Integer sums do not depend on
// their order, so all dispatches agree on every sum to the last bit, and the
// error of a sum over a whole vocabulary stays below 2^-40.
#pragma once

#include "prelude.h"

// More than any sum of weights: a draw at this threshold takes the last id.
constant constexpr ulong TAKE_LAST = ~0ul;
constant constexpr ulong ONE = 1ul << 60;

constant constexpr float UNITS = 1152921504606846976.0f;

METAL_FUNC ulong fixed_point(float p) {
  return ulong(p * UNITS);
}

METAL_FUNC float from_fixed_point(ulong p) {
  return float(p) * (1.0f / UNITS);
}

// A uniform in [0, 1) in units of 2^-48. The low part counts in units of 2^-24.
METAL_FUNC ulong fine_uniform(float high, float low) {
  high = high > 0.0f ? metal::min(high, 1.0f) : 0.0f;
  low = low > 0.0f ? metal::min(low, 1.0f) : 0.0f;
  return ulong(high * 281474976710656.0f) + ulong(low * 16777216.0f);
}

// floor(total * u / 2^48)
METAL_FUNC ulong scale_by(ulong total, ulong u) {
  ulong mask = (1ul << 24) - 1ul;
  ulong u1 = u >> 24;
  ulong u0 = u & mask;
  ulong t1 = total >> 24;
  ulong t0 = total & mask;
  return t1 * u1 + ((t1 * u0 + t0 * u1 + ((t0 * u0) >> 24)) >> 24);
}

METAL_FUNC ulong shuffle(ulong x, uint lane) {
  uint low = simd_shuffle(uint(x), ushort(lane));
  uint high = simd_shuffle(uint(x >> 32), ushort(lane));
  return (ulong(high) << 32) | ulong(low);
}

// By parts of 27 bits, of which 32 add up in a word.
METAL_FUNC ulong simd_total(ulong x) {
  uint mask = (1u << 27) - 1u;
  ulong low = simd_sum(uint(x) & mask);
  ulong middle = simd_sum(uint(x >> 27) & mask);
  ulong high = simd_sum(uint(x >> 54));
  return low + (middle << 27) + (high << 54);
}

METAL_FUNC ulong simd_prefix(ulong x, uint lane) {
  for (ushort delta = 1; delta < 32; delta *= 2) {
    uint low = simd_shuffle_up(uint(x), delta);
    uint high = simd_shuffle_up(uint(x >> 32), delta);
    x += lane >= delta ? (ulong(high) << 32) | ulong(low) : 0ul;
  }
  return x;
}

// The lane where `sum`, that of the weights up to it, passes the threshold and
// how much of the threshold is left in it. If it never does, the last lane with
// a weight and TAKE_LAST. Lane -1 if no lane has a weight.
struct Pick {
  int lane;
  ulong rest;
};

METAL_FUNC Pick pick(ulong weight, ulong sum, ulong threshold) {
  uint hits = lanes_where(weight > 0 && sum > threshold);
  uint all = lanes_where(weight > 0);
  if (hits == 0) {
    return Pick{all == 0 ? -1 : 31 - int(metal::clz(all)), TAKE_LAST};
  }
  uint lane = metal::ctz(hits);
  return Pick{int(lane), threshold - shuffle(sum - weight, lane)};
}
