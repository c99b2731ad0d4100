// What MLX's CUDA backend exports and we call. MLX's own header needs the CUDA
// toolkit. The symbols are weak: with a libmlx of another backend they are
// null.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "mlx/array.h"
#include "mlx/stream.h"

struct CUfunc_st;

struct dim3 {
  unsigned int x, y, z;
};

namespace mlx::core::cu {

// Where Buffer::ptr() leads.
struct CudaBuffer {
  void* data;
  size_t size;
  int device; // -1: managed memory
};

class __attribute__((visibility("default"))) CommandEncoder {
 public:
  __attribute__((weak)) void set_input_array(const array& x);
  __attribute__((weak)) void set_output_array(const array& x);
  __attribute__((weak)) void add_kernel_node_raw(
      CUfunc_st* kernel,
      dim3 grid,
      dim3 block,
      dim3 cluster,
      uint32_t shared_bytes,
      void** arguments);
  __attribute__((weak)) void add_completed_handler(std::function<void()> task);
};

__attribute__((weak, visibility("default"))) CommandEncoder&
get_command_encoder(Stream stream);

} // namespace mlx::core::cu
