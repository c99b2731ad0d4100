// How the inputs of the ops, of any dtype and strides, become kernel arguments.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "gpu/encoder.h"

namespace mlx_mtp::gpu {

// The structs that the host shares with the kernels.
#include "../../metal/params.h"

constexpr int GROUP = 256; // logits a maximum of the filters
constexpr int FEW = 512; // candidates that a row keeps with filters

inline int ceil_div(int n, int m) {
  return (n + m - 1) / m;
}

// Logits a threadgroup of the first dispatch: few for short work, so that it
// spreads over the whole GPU, more where it is filled anyway.
inline int chunk_size(int rows, int vocab) {
  return static_cast<int64_t>(rows) * vocab < (1 << 23) ? 4096 : 16384;
}

// Groups whose weights a simdgroup of the second dispatch sums, of so many of
// all sequences: more where there is a GPU full of simdgroups anyway.
inline int part_size(int64_t groups) {
  return std::clamp<int64_t>((groups + 2699) / 2700, 1, 8);
}

// Threads of a threshold: more where few rows leave the GPU empty.
inline int threshold_threads(int rows, int vocab) {
  return chunk_size(rows, vocab) == 4096 ? 640 : 512;
}

// A threadgroup with a thread for each of so many things, as far as possible.
inline int threads_for(int count) {
  return std::min(32 * ceil_div(count, 32), 1024);
}

// The name of a dtype in the names of kernels.
const char* type_name(mx::Dtype dtype);

// Elements between neighbours along an axis, 0 where there are no neighbours.
int stride(const mx::array& x, int axis);

// Memory for the kernels of one primitive: arrays of so many bytes, in one
// allocation.
std::vector<mx::array> scratch(
    Encoder& encoder,
    const std::vector<int64_t>& sizes);

// Fills `out`, which has no data, with the values of x: a row-contiguous array
// in memory of its own.
void copy(Encoder& encoder, const mx::array& x, mx::array& out);

// x, or a copy where x has another dtype.
mx::array cast(Encoder& encoder, const mx::array& x, mx::Dtype dtype);

// x, or a copy where the last axis of x is not contiguous.
mx::array rows(Encoder& encoder, const mx::array& x);

// x, or a copy where the rows of x have no common stride, as they have in
// logits[:, -1] but not always with more axes.
mx::array flat_rows(Encoder& encoder, const mx::array& x);

// The stride of the rows of flat_rows(x).
int row_stride(const mx::array& x);

// Whether every row of logits starts at a multiple of 16 bytes.
bool is_aligned(const mx::array& logits);

struct Grid {
  int x;
  int y = 1;
  int z = 1;
};

// The kernels of one op over one list of buffers. A kernel finds a buffer under
// its index in the list and the params under the next one.
template <typename Params>
class Kernels {
 public:
  Kernels(
      Encoder& encoder,
      const KernelSource& source,
      const Params& params,
      std::vector<mx::array> buffers)
      : encoder_(encoder),
        source_(source),
        params_(params),
        buffers_(std::move(buffers)) {}

  // grid(threads) is the grid for threadgroups of the size that the device
  // gives, `best` or less.
  template <typename F>
  void run(
      const std::string& name,
      std::initializer_list<int> reads,
      std::initializer_list<int> writes,
      int best,
      F&& grid) {
    encoder_.set_kernel(source_, name);
    for (int i : reads) {
      encoder_.set_input_array(buffers_[i], i);
    }
    for (int i : writes) {
      encoder_.set_output_array(buffers_[i], i);
    }
    encoder_.set_bytes(params_, buffers_.size());
    int threads = encoder_.threads(best);
    Grid size = grid(threads);
    encoder_.dispatch(size.x, size.y, size.z, threads);
  }

 private:
  Encoder& encoder_;
  const KernelSource& source_;
  const Params& params_;
  std::vector<mx::array> buffers_;
};

} // namespace mlx_mtp::gpu
