#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/inputs.h"
#include "cpu/task.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

// A [B, H, rows, D] array seen as bytes.
struct View {
  char* data;
  int64_t strides[4];
  size_t itemsize;

  explicit View(const mx::array& x)
      : data(const_cast<char*>(x.data<char>())), itemsize(x.itemsize()) {
    for (int i = 0; i < 4; ++i) {
      strides[i] = x.strides(i) * x.itemsize();
    }
  }

  char* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * strides[0] + h * strides[1] + i * strides[2];
  }
};

// Where the rows of one sequence go: slot(i) = (start + i) % modulus.
struct Span {
  int64_t start;
  int64_t count;
  int64_t modulus;
};

Span clamp_span(
    int64_t start,
    int64_t count,
    int64_t T,
    int64_t S,
    int64_t ring) {
  auto slots = ring > 0 ? ring : S;
  count = std::clamp<int64_t>(count, 0, std::min(T, slots));
  if (ring > 0) {
    start = ((start % ring) + ring) % ring;
  } else {
    start = std::clamp<int64_t>(start, 0, S - count);
  }
  return {start, count, slots};
}

void copy_row(
    const View& src,
    const char* from,
    const View& dst,
    char* to,
    int D) {
  auto itemsize = dst.itemsize;
  auto packed = static_cast<int64_t>(itemsize);
  if (src.strides[3] == packed && dst.strides[3] == packed) {
    std::memcpy(to, from, D * itemsize);
    return;
  }
  for (int64_t i = 0; i < D; ++i) {
    std::memcpy(to + i * dst.strides[3], from + i * src.strides[3], itemsize);
  }
}

void copy_rows(
    const View& src,
    const View& dst,
    int64_t b,
    const mx::Shape& shape,
    const Span& span) {
  for (int64_t h = 0; h < shape[1]; ++h) {
    for (int64_t i = 0; i < span.count; ++i) {
      auto slot = (span.start + i) % span.modulus;
      copy_row(src, src.row(b, h, i), dst, dst.row(b, h, slot), shape[3]);
    }
  }
}

} // namespace

void CommitRows::eval_cpu(
    const std::vector<mx::array>& inputs,
    mx::array& out) {
  auto& cache = inputs[0];
  bool in_place = cache.is_donatable() && cache.flags().row_contiguous;
  if (in_place) {
    out.copy_shared_buffer(cache);
  } else {
    cpu::allocate(out);
  }
  if (out.size() == 0) {
    return;
  }
  auto task = [in_place, ring = ring_](cpu::Arrays& in, cpu::Arrays& out) {
    View dst(out[0]);
    auto& shape = out[0].shape();
    auto T = in[1].shape(2);
    for (int64_t b = 0; b < shape[0]; ++b) {
      if (!in_place) {
        copy_rows(View(in[0]), dst, b, shape, {0, shape[2], shape[2]});
      }
      auto span = clamp_span(
          cpu::value<int32_t>(in[2], b),
          cpu::value<int32_t>(in[3], b),
          T,
          shape[2],
          ring);
      copy_rows(View(in[1]), dst, b, shape, span);
    }
  };
  std::vector<mx::array> outputs = {out};
  cpu::dispatch(stream(), inputs, outputs, task);
}

} // namespace mlx_mtp
