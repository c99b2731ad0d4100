// One row of logits as the CPU kernels see it.
#pragma once

#include <algorithm>

#include "cpu/row_kernels.h"
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

// A row of any dtype, stride and mask, read in blocks. A masked logit is -inf.
class Row {
 public:
  Row() = default;
  Row(const mx::array& logits, const mx::array* allowed, int64_t row)
      : data_(
            logits.data<char>() + row_offset(logits, row) * logits.itemsize()),
        dtype_(logits.dtype()),
        stride_(logits.strides(-1)),
        size_(logits.shape(-1)) {
    while (block_ < max_block && size_ > 128 * block_) {
      block_ *= 2;
    }
    if (allowed) {
      words_ = allowed->data<uint32_t>() + row_offset(*allowed, row);
      word_stride_ = allowed->strides(-1);
    }
  }

  int size() const {
    return size_;
  }

  // The size of a block: many blocks make a good bound for top-k.
  int block() const {
    return block_;
  }

  int blocks() const {
    return (size_ + block_ - 1) / block_;
  }

  int length(int block) const {
    return std::min(block_, size_ - block * block_);
  }

  // The values of a block, in place where they lie as float32, else in
  // `buffer`.
  const float* read(int block, float* buffer) const {
    return read(block * block_, length(block), buffer);
  }

  float operator[](int id) const {
    float buffer[32];
    // From the start of a mask word.
    return read(id / 32 * 32, id % 32 + 1, buffer)[id % 32];
  }

 private:
  const float* read(int begin, int n, float* buffer) const;

  const char* data_{nullptr};
  mx::Dtype dtype_{mx::float32};
  int64_t stride_{1};
  int size_{0};
  int block_{32}; // a whole number of mask words
  const uint32_t* words_{nullptr};
  int64_t word_stride_{0};
};

inline const float* Row::read(int begin, int n, float* buffer) const {
  auto* x = data_ + begin * stride_ * size_of(dtype_);
  if (dtype_ == mx::float16) {
    load_float16(reinterpret_cast<const uint16_t*>(x), stride_, n, buffer);
  } else if (dtype_ == mx::bfloat16) {
    load_bfloat16(reinterpret_cast<const uint16_t*>(x), stride_, n, buffer);
  } else if (stride_ == 1 && !words_) {
    return reinterpret_cast<const float*>(x);
  } else {
    load_float32(reinterpret_cast<const float*>(x), stride_, n, buffer);
  }
  if (words_) {
    mask(words_ + begin / 32 * word_stride_, word_stride_, n, buffer);
  }
  return buffer;
}

} // namespace mlx_mtp::cpu
