// Readers for the small inputs of the ops, whatever their strides.
#pragma once

#include "cpu/shaped_row.h"

namespace mlx_mtp::cpu {

// x[i], or the only value of x
template <typename T>
T value(const mx::array& x, int64_t i) {
  return x.ndim() == 0 ? x.data<T>()[0] : x.data<T>()[i * x.strides(0)];
}

// x[i, j]
template <typename T>
T value(const mx::array& x, int64_t i, int64_t j) {
  return x.data<T>()[i * x.strides(0) + j * x.strides(1)];
}

// A uniform in [0, 1) with 48 bits: 24 are too coarse for a large vocabulary.
inline double fine_uniform(float high, float low) {
  return high + 0x1p-24 * low;
}

// The parameters of sequence b from four inputs in a row.
inline RowParams
row_params(const mx::array* inputs, int64_t b, bool temperature_first) {
  return {
      value<float>(inputs[0], b),
      value<float>(inputs[1], b),
      value<float>(inputs[2], b),
      value<float>(inputs[3], b),
      temperature_first};
}

} // namespace mlx_mtp::cpu
