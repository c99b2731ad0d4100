// How the evaluation of an op becomes a task of MLX's CPU stream.
#pragma once

#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_mtp::cpu {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;

inline void allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
}

// Runs task(inputs, outputs) on the stream. MLX's CUDA backend moves the data
// of an array when the CPU first looks at it: that must not be before the task
// runs, nor in two threads at once.
template <typename Task>
void dispatch(
    mx::Stream stream,
    const Arrays& inputs,
    Arrays& outputs,
    Task&& task) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  Arrays in;
  for (auto& x : inputs) {
    encoder.set_input_array(x);
    in.push_back(mx::array::unsafe_weak_copy(x));
  }
  Arrays out;
  for (auto& x : outputs) {
    encoder.set_output_array(x);
    out.push_back(mx::array::unsafe_weak_copy(x));
  }
  encoder.dispatch([in = std::move(in),
                    out = std::move(out),
                    task = std::forward<Task>(task)]() mutable {
    for (auto* arrays : {&in, &out}) {
      for (mx::array& x : *arrays) {
        x.data<char>();
      }
    }
    task(in, out);
  });
}

} // namespace mlx_mtp::cpu
