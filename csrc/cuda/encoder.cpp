#include "gpu/encoder.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/backend.h"
#include "cuda/compile.h"
#include "cuda/driver.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_mtp::gpu {

namespace {

constexpr int SIMD_SIZE = 32;

struct Kernel {
  CUfunc_st* function;
  int max_threads;
};

// `Arguments` of metal_stdlib.h.
struct Arguments {
  void* buffers[24];
  alignas(8) char bytes[192];
};

// The kernel that an encoder has selected and what is bound to it.
struct Launch {
  Kernel kernel;
  std::map<int, void*> buffers; // by index
  Arguments arguments;
};

mx::cu::CommandEncoder& encoder(mx::Stream stream) {
  if (!mx::cu::get_command_encoder) {
    throw std::runtime_error(
        "[gpu] This MLX has no GPU that mlx-mtp can use. Pass stream=mx.cpu or "
        "call mx.set_default_device(mx.cpu) first.");
  }
  return mx::cu::get_command_encoder(stream);
}

Kernel load(const KernelSource& source, const std::string& name, int device) {
  constexpr int MAJOR = 75; // of CUdevice_attribute
  constexpr int MINOR = 76;
  auto& driver = cuda::driver();
  int major, minor;
  cuda::check(
      "cuDeviceGetAttribute",
      driver.cuDeviceGetAttribute(&major, MAJOR, device));
  cuda::check(
      "cuDeviceGetAttribute",
      driver.cuDeviceGetAttribute(&minor, MINOR, device));
  CUmod_st* module;
  auto code = cuda::compile(source, name, major, minor, false);
  if (driver.cuModuleLoadData(&module, code.data())) {
    code = cuda::compile(source, name, major, minor, true);
    cuda::check(
        "cuModuleLoadData", driver.cuModuleLoadData(&module, code.data()));
  }
  Kernel kernel = {};
  cuda::check(
      "cuModuleGetFunction",
      driver.cuModuleGetFunction(&kernel.function, module, name.c_str()));
  cuda::check(
      "cuFuncGetAttribute",
      driver.cuFuncGetAttribute(&kernel.max_threads, 0, kernel.function));
  return kernel;
}

void* address(const mx::array& x) {
  auto* buffer = static_cast<const mx::cu::CudaBuffer*>(x.buffer().ptr());
  return static_cast<char*>(buffer->data) + x.offset();
}

Launch& pending(void* pipeline) {
  return *static_cast<Launch*>(pipeline);
}

} // namespace

// By a concatenation of nothing: all else that MLX exports and that allocates
// on a device runs a kernel as well.
void Encoder::allocate(mx::array& x) {
  static thread_local std::map<int, mx::array> nothing;
  auto it = nothing.find(stream_.index);
  if (it == nothing.end()) {
    mx::array empty(mx::Shape{0}, x.dtype(), nullptr, {});
    auto lazy = mx::concatenate({empty, empty}, 0, stream_);
    it = nothing.emplace(stream_.index, lazy).first;
  }
  std::vector<mx::array> outputs = {x};
  it->second.primitive().eval_gpu({}, outputs);
}

// MLX has made the device of the stream current in this thread.
void Encoder::set_kernel(const KernelSource& source, const std::string& name) {
  static std::mutex mutex;
  static std::map<std::pair<int, std::string>, Kernel> kernels;
  static thread_local Launch launch;
  encoder(stream_);
  int device;
  cuda::check("cuCtxGetDevice", cuda::driver().cuCtxGetDevice(&device));
  std::lock_guard lock(mutex);
  auto it = kernels.find({device, name});
  if (it == kernels.end()) {
    it = kernels.emplace(std::pair(device, name), load(source, name, device))
             .first;
  }
  launch.kernel = it->second;
  launch.buffers.clear();
  pipeline_ = &launch;
}

void Encoder::set_input_array(const mx::array& x, int index) {
  encoder(stream_).set_input_array(x);
  pending(pipeline_).buffers[index] = address(x);
}

void Encoder::set_output_array(mx::array& x, int index) {
  encoder(stream_).set_output_array(x);
  pending(pipeline_).buffers[index] = address(x);
}

void Encoder::set_bytes(const void* data, size_t size, int) {
  std::memcpy(pending(pipeline_).arguments.bytes, data, size);
}

int Encoder::threads(int best) const {
  int most = pending(pipeline_).kernel.max_threads;
  return std::min(best, most / SIMD_SIZE * SIMD_SIZE);
}

// A kernel takes the buffers in the order of their indices, without gaps.
void Encoder::dispatch(int x, int y, int z, int threads) {
  if (std::max(y, z) > 65535) {
    std::ostringstream msg;
    msg << "[gpu] CUDA takes at most 65535 sequences, heads or chunks but the "
        << "grid is (" << x << ", " << y << ", " << z << ").";
    throw std::runtime_error(msg.str());
  }
  auto& [kernel, buffers, arguments] = pending(pipeline_);
  std::transform(
      buffers.begin(), buffers.end(), arguments.buffers, [](auto& binding) {
        return binding.second;
      });
  void* all[] = {&arguments};
  encoder(stream_).add_kernel_node_raw(
      kernel.function,
      {unsigned(x), unsigned(y), unsigned(z)},
      {unsigned(threads), 1, 1},
      {},
      0,
      all);
}

void Encoder::eval(mx::array& lazy) {
  std::vector<mx::array> outputs = {lazy};
  lazy.primitive().eval_gpu(lazy.inputs(), outputs);
}

void Encoder::add_temporary(const mx::array& x) {
  encoder(stream_).add_completed_handler([data = x.data_shared_ptr()] {});
}

} // namespace mlx_mtp::gpu
