#include <algorithm>
#include <cstring>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
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
  auto& rows = inputs[1];
  if (out.size() == 0) {
    out.set_data(mx::allocator::malloc(0));
    return;
  }
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.set_input_array(cache);
  encoder.set_input_array(rows);
  encoder.set_output_array(out);
  if (cache.is_donatable() && cache.flags().row_contiguous) {
    out.copy_shared_buffer(cache);
  } else {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    encoder.dispatch([src = View(cache), dst = View(out), shape = out.shape()] {
      for (int64_t b = 0; b < shape[0]; ++b) {
        copy_rows(src, dst, b, shape, {0, shape[2], shape[2]});
      }
    });
  }
  encoder.dispatch([src = View(rows),
                    dst = View(out),
                    start = inputs[2].data<int32_t>(),
                    start_stride = inputs[2].strides(0),
                    count = inputs[3].data<int32_t>(),
                    count_stride = inputs[3].strides(0),
                    shape = out.shape(),
                    T = rows.shape(2),
                    ring = ring_] {
    for (int64_t b = 0; b < shape[0]; ++b) {
      auto span = clamp_span(
          start[b * start_stride], count[b * count_stride], T, shape[2], ring);
      copy_rows(src, dst, b, shape, span);
    }
  });
}

} // namespace mlx_mtp
