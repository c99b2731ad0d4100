// One row of logits as the CPU kernels see it.
#pragma once

#include <cstdint>
#include <limits>

#include "mlx/array.h"

namespace mlx_mtp::cpu {

namespace mx = mlx::core;

// The element offset of a row of x, counted over all axes but the last one.
inline int64_t row_offset(const mx::array& x, int64_t row) {
  int64_t offset = 0;
  for (int axis = x.ndim() - 2; axis >= 0; --axis) {
    offset += (row % x.shape(axis)) * x.strides(axis);
    row /= x.shape(axis);
  }
  return offset;
}

// A row of any dtype, stride and mask. A masked logit reads as -inf.
class Row {
 public:
  Row(const mx::array& logits, const mx::array* allowed, int64_t row)
      : data_(
            logits.data<char>() + row_offset(logits, row) * logits.itemsize()),
        dtype_(logits.dtype()),
        stride_(logits.strides(-1)),
        size_(logits.shape(-1)) {
    if (allowed) {
      words_ = allowed->data<uint32_t>() + row_offset(*allowed, row);
      word_stride_ = allowed->strides(-1);
    }
  }

  int size() const {
    return size_;
  }

  float operator[](int id) const {
    if (words_ && !((words_[(id / 32) * word_stride_] >> (id % 32)) & 1)) {
      return -std::numeric_limits<float>::infinity();
    }
    switch (dtype_) {
      case mx::float16:
        return reinterpret_cast<const mx::float16_t*>(data_)[id * stride_];
      case mx::bfloat16:
        return reinterpret_cast<const mx::bfloat16_t*>(data_)[id * stride_];
      default:
        return reinterpret_cast<const float*>(data_)[id * stride_];
    }
  }

 private:
  const char* data_;
  mx::Dtype dtype_;
  int64_t stride_;
  int size_;
  const uint32_t* words_{nullptr};
  int64_t word_stride_{0};
};

} // namespace mlx_mtp::cpu
