// All that this package needs of MLX's GPU backends: metal/encoder.cpp
// implements it on MLX's Metal device, cuda/encoder.cpp on its CUDA device, and
// the tests with an emulator.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernel_source.h"
#include "mlx/array.h"

namespace mlx_mtp::gpu {

namespace mx = mlx::core;

// Encodes the kernels of one primitive on its stream. Every argument is bound
// anew for each dispatch: MLX orders the dispatches by what they bind.
class Encoder {
 public:
  explicit Encoder(mx::Stream stream) : stream_(stream) {}

  // Memory of the device for x, which has no data yet.
  void allocate(mx::array& x);

  // Selects a kernel of `source`, which is compiled at first use. The name
  // carries all that its code depends on.
  void set_kernel(const KernelSource& source, const std::string& name);

  void set_input_array(const mx::array& x, int index);
  void set_output_array(mx::array& x, int index);

  template <typename T>
  void set_bytes(const T& value, int index) {
    set_bytes(&value, sizeof(T), index);
  }

  // The size of the threadgroups of the selected kernel: `best`, or less where
  // its pipeline allows less. A multiple of the 32 threads of a simdgroup.
  int threads(int best) const;

  // Grid in threadgroups, none of them 0.
  void dispatch(int x, int y, int z, int threads);

  // Evaluates a lazy array, of one operation on arrays that have data. Its own
  // data is set: MLX asks an output for its primitive.
  void eval(mx::array& lazy);

  // x, or the same values where the device reads them fast: MLX may keep a
  // number in the host's memory.
  mx::array resident(const mx::array& x);

  // Keeps x alive until the kernels have run. No input or output may share its
  // data: MLX does not order other work after it.
  void add_temporary(const mx::array& x);

  // Keeps data of inputs and outputs until the kernels have run, where
  // can_keep(): on Metal this has not been tried.
  void keep(std::vector<std::shared_ptr<mx::array::Data>> used);
  static bool can_keep();

  mx::Stream stream() const {
    return stream_;
  }

 private:
  void set_bytes(const void* data, size_t size, int index);

  mx::Stream stream_;
  void* pipeline_{nullptr}; // the selected kernel, as the backend keeps it
};

} // namespace mlx_mtp::gpu
