#include <string>

#include "gpu/arguments.h"
#include "gpu_kernels.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

// Bytes between neighbours along an axis.
int64_t byte_stride(const mx::array& x, int axis) {
  return static_cast<int64_t>(gpu::stride(x, axis)) * x.itemsize();
}

int64_t row_bytes(const mx::array& x) {
  return static_cast<int64_t>(x.shape(3)) * x.itemsize();
}

// The widest unit in bytes that divides every row and where it starts.
int unit_size(const mx::array& cache, const mx::array& rows) {
  auto bits = row_bytes(rows) | cache.offset() | rows.offset();
  for (int axis = 0; axis < 3; ++axis) {
    bits |= byte_stride(rows, axis);
  }
  for (int unit : {16, 4, 2}) {
    if (bits % unit == 0) {
      return unit;
    }
  }
  return 1;
}

} // namespace

void CommitRows::eval_gpu(
    const std::vector<mx::array>& inputs,
    mx::array& out) {
  auto& cache = inputs[0];
  gpu::Encoder encoder(stream());
  if (out.size() == 0) {
    encoder.allocate(out);
    return;
  }
  if (cache.is_donatable() && cache.flags().row_contiguous) {
    out.copy_shared_buffer(cache);
  } else {
    gpu::copy(encoder, cache, out);
  }
  if (inputs[1].size() == 0) {
    return;
  }
  auto rows = gpu::rows(encoder, inputs[1]);
  auto& start = inputs[2];
  auto& count = inputs[3];
  int unit = unit_size(out, rows);
  gpu::CommitRowsParams params = {};
  params.heads = out.shape(1);
  params.slots = out.shape(2);
  params.rows = rows.shape(2);
  params.units = row_bytes(rows) / unit;
  params.ring = ring_;
  params.start_stride = gpu::stride(start, 0);
  params.count_stride = gpu::stride(count, 0);
  for (int axis = 0; axis < 3; ++axis) {
    params.rows_strides[axis] = byte_stride(rows, axis) / unit;
  }
  gpu::Kernels kernels(
      encoder, kernels::commit_rows, params, {out, rows, start, count});
  kernels.run(
      "commit_rows_" + std::to_string(8 * unit),
      {1, 2, 3},
      {0},
      256,
      [&](int threads) {
        int groups = gpu::ceil_div(params.rows * params.units, threads);
        return gpu::Grid{groups, out.shape(1), out.shape(0)};
      });
}

} // namespace mlx_mtp
