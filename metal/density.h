// The shaped distribution of a row, without its filters.
#pragma once

#include "row.h"

// The sampling parameters of one sequence.
struct Sampling {
  float temperature;
  float top_k;
  float top_p;
  float min_p;
  bool temperature_first;
};

METAL_FUNC bool is_valid(Sampling s) {
  return s.top_k >= 0.0f && s.top_k == metal::floor(s.top_k) &&
      s.top_p > 0.0f && s.top_p <= 1.0f && s.min_p >= 0.0f && s.min_p <= 1.0f;
}

// Infinite for a greedy row, -1 for a temperature that is out of range.
METAL_FUNC float inverse_temperature(float t) {
  if (!(t >= 0.0f && t < INFINITY)) {
    return -1.0f;
  }
  // The bound keeps it a normal number.
  return t == 0.0f ? INFINITY : metal::max(1.0f / t, 1.1754944e-38f);
}

// As used in sums, which a greedy row does not need.
METAL_FUNC float finite_inverse(float inv_t) {
  return inv_t < INFINITY ? inv_t : 1.0f;
}

METAL_FUNC Density unusable_density() {
  return Density{0.0f, 1.0f, -INFINITY, 0.0f, -1, 0, 1.0f, 0, -1};
}

METAL_FUNC Density point_density(int id) {
  return Density{0.0f, INFINITY, -INFINITY, 0.0f, id, 1, 1.0f, 0, -1};
}

// From the sums of a row over {z >= threshold}.
METAL_FUNC Density make_density(Partial row, float inv_t, float threshold) {
  if (row.best < 0 || !(row.sum > 0.0f) || !(inv_t > 0.0f)) {
    return unusable_density();
  }
  Density d = point_density(row.best);
  d.ref = row.max;
  d.sum = row.sum;
  if (inv_t < INFINITY) {
    d.point = -1;
    d.inv_t = inv_t;
    d.threshold = threshold;
    d.scale = 1.0f / row.scaled_sum;
  }
  return d;
}

METAL_FUNC bool is_kept(Density d, float z) {
  return z >= d.threshold && z > -INFINITY;
}

// Of a logit where there is no point. That of -inf is 0 by itself.
METAL_FUNC float spread_probability(Density d, float z) {
  float p = metal::exp2((z - d.ref) * (d.inv_t * LOG2_E)) * d.scale;
  return z >= d.threshold ? p : 0.0f;
}

METAL_FUNC float probability(Density d, int id, float z) {
  if (d.point >= 0) {
    return id == d.point ? 1.0f : 0.0f;
  }
  return spread_probability(d, z);
}

METAL_FUNC float log_softmax(Density d, float z) {
  return (z - d.ref) - metal::log(d.sum);
}
