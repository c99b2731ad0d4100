#include "gpu/encoder.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"
#include "mlx/primitives.h"

namespace mlx_mtp::gpu {

namespace {

constexpr int SIMD_SIZE = 32;

mx::metal::CommandEncoder& encoder(mx::Stream stream) {
  return mx::metal::get_command_encoder(stream);
}

} // namespace

void Encoder::allocate(mx::array& x) {
  x.set_data(mx::allocator::malloc(x.nbytes()));
}

// MLX caches libraries and pipelines under their names.
void Encoder::set_kernel(const KernelSource& source, const std::string& name) {
  auto& device = mx::metal::device(stream_.device);
  auto library = device.get_library(
      std::string("mlx_mtp_") + source.name + "_" + source.hash,
      [&] { return std::string(source.text); });
  auto kernel = device.get_kernel(name, library);
  if (kernel->threadExecutionWidth() != SIMD_SIZE) {
    std::ostringstream msg;
    msg << "[" << source.name << "] needs a GPU with simdgroups of "
        << SIMD_SIZE << " threads but this one has "
        << kernel->threadExecutionWidth() << ". Pass stream=mx.cpu.";
    throw std::runtime_error(msg.str());
  }
  pipeline_ = kernel;
  encoder(stream_).set_compute_pipeline_state(kernel);
}

void Encoder::set_input_array(const mx::array& x, int index) {
  encoder(stream_).set_input_array(x, index);
}

void Encoder::set_output_array(mx::array& x, int index) {
  encoder(stream_).set_output_array(x, index);
}

void Encoder::set_bytes(const void* data, size_t size, int index) {
  encoder(stream_).set_bytes(static_cast<const char*>(data), size, index);
}

int Encoder::threads(int best) const {
  auto kernel = static_cast<MTL::ComputePipelineState*>(pipeline_);
  int most = kernel->maxTotalThreadsPerThreadgroup();
  return std::min(best, most / SIMD_SIZE * SIMD_SIZE);
}

void Encoder::dispatch(int x, int y, int z, int threads) {
  encoder(stream_).dispatch_threadgroups(
      MTL::Size(x, y, z), MTL::Size(threads, 1, 1));
}

void Encoder::eval(mx::array& lazy) {
  std::vector<mx::array> outputs = {lazy};
  lazy.primitive().eval_gpu(lazy.inputs(), outputs);
}

mx::array Encoder::resident(const mx::array& x) {
  return x;
}

void Encoder::keep(std::vector<std::shared_ptr<mx::array::Data>>) {
  throw std::runtime_error("[gpu] Metal keeps no data for recordings.");
}

bool Encoder::can_keep() {
  return false;
}

void Encoder::add_temporary(const mx::array& x) {
  encoder(stream_).add_temporary(x);
}

} // namespace mlx_mtp::gpu
