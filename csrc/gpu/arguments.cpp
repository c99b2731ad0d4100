#include "gpu/arguments.h"

#include <limits>
#include <stdexcept>

#include "mlx/ops.h"

namespace mlx_mtp::gpu {

namespace {

// The kernels count elements in 32 bits.
bool has_int_strides(const mx::array& x) {
  for (int i = 0; i < static_cast<int>(x.ndim()); ++i) {
    auto s = x.shape(i) > 1 ? x.strides(i) : 0;
    if (s < std::numeric_limits<int>::min() ||
        s > std::numeric_limits<int>::max()) {
      return false;
    }
  }
  return true;
}

bool has_contiguous_rows(const mx::array& x) {
  return has_int_strides(x) &&
      (x.ndim() == 0 || x.shape(-1) == 1 || x.strides(-1) == 1);
}

// Whether the axes before the last one are one axis in memory.
bool has_row_stride(const mx::array& x) {
  int64_t expected = 0;
  for (int i = x.ndim() - 2; i >= 0; --i) {
    if (x.shape(i) == 1) {
      continue;
    }
    if (expected != 0 && x.strides(i) != expected) {
      return false;
    }
    expected = x.strides(i) * x.shape(i);
  }
  return true;
}

// contiguous() shares the memory of an array that is row-contiguous already.
mx::array evaluated_copy(Encoder& encoder, const mx::array& x) {
  auto flags = x.flags();
  flags.row_contiguous = false;
  mx::array view(x.shape(), x.dtype(), nullptr, {});
  view.copy_shared_buffer(x, x.strides(), flags, x.data_size());
  auto lazy = mx::contiguous(view, false, encoder.stream());
  encoder.eval(lazy);
  return lazy;
}

mx::array copy(Encoder& encoder, const mx::array& x) {
  auto out = evaluated_copy(encoder, x);
  encoder.add_temporary(out);
  return out;
}

} // namespace

const char* type_name(mx::Dtype dtype) {
  switch (dtype) {
    case mx::float32:
      return "float32";
    case mx::float16:
      return "float16";
    case mx::bfloat16:
      return "bfloat16";
    default:
      throw std::invalid_argument("[gpu] No kernel for this dtype.");
  }
}

int stride(const mx::array& x, int axis) {
  return axis < static_cast<int>(x.ndim()) && x.shape(axis) > 1
      ? x.strides(axis)
      : 0;
}

std::vector<mx::array> scratch(
    Encoder& encoder,
    const std::vector<int64_t>& sizes) {
  constexpr int64_t ALIGNMENT = 256;
  std::vector<int64_t> starts;
  int64_t total = 0;
  for (auto size : sizes) {
    starts.push_back(total);
    total += (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  mx::array all({static_cast<int>(total)}, mx::uint8, nullptr, {});
  encoder.allocate(all);
  encoder.add_temporary(all);
  std::vector<mx::array> parts;
  for (size_t i = 0; i < sizes.size(); ++i) {
    mx::array part({static_cast<int>(sizes[i])}, mx::uint8, nullptr, {});
    part.copy_shared_buffer(
        all, all.strides(), all.flags(), sizes[i], starts[i]);
    parts.push_back(part);
  }
  return parts;
}

void copy(Encoder& encoder, const mx::array& x, mx::array& out) {
  out.copy_shared_buffer(evaluated_copy(encoder, x));
}

mx::array cast(Encoder& encoder, const mx::array& x, mx::Dtype dtype) {
  if (x.dtype() == dtype) {
    return x;
  }
  auto lazy = mx::astype(x, dtype, encoder.stream());
  encoder.eval(lazy);
  encoder.add_temporary(lazy);
  return lazy;
}

mx::array rows(Encoder& encoder, const mx::array& x) {
  return has_contiguous_rows(x) ? x : copy(encoder, x);
}

mx::array flat_rows(Encoder& encoder, const mx::array& x) {
  return has_contiguous_rows(x) && has_row_stride(x) ? x : copy(encoder, x);
}

int row_stride(const mx::array& x) {
  for (int i = x.ndim() - 2; i >= 0; --i) {
    if (x.shape(i) > 1) {
      return x.strides(i);
    }
  }
  return 0;
}

bool is_aligned(const mx::array& logits) {
  int64_t bytes = logits.offset();
  bool aligned = bytes % 16 == 0;
  for (int i = 0; i + 1 < static_cast<int>(logits.ndim()); ++i) {
    bytes = static_cast<int64_t>(stride(logits, i)) * logits.itemsize();
    aligned &= bytes % 16 == 0;
  }
  return aligned;
}

} // namespace mlx_mtp::gpu
