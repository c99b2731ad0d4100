#include "gpu/encoder.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <tuple>
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
constexpr size_t MANAGED_BYTES = 8; // MLX keeps so small arrays on the host
constexpr size_t MAX_RESIDENT = 1024; // values that are kept on the device
constexpr int MAX_BUFFERS = 24; // of a kernel

struct Kernel {
  CUfunc_st* function;
  int max_threads;
};

// `Arguments` of metal_stdlib.h.
struct Arguments {
  void* buffers[MAX_BUFFERS];
  alignas(8) char bytes[192];
};

// The kernel that an encoder has selected and what is bound to it.
struct Launch {
  mx::cu::CommandEncoder* encoder;
  Kernel kernel;
  void* buffers[MAX_BUFFERS]; // by index
  uint32_t bound; // a bit for each of them
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

const mx::cu::CudaBuffer& buffer_of(const mx::array& x) {
  return *static_cast<const mx::cu::CudaBuffer*>(x.buffer().ptr());
}

void* address(const mx::array& x) {
  return static_cast<char*>(buffer_of(x).data) + x.offset();
}

// Whether x is known already and lies where every read crosses the bus.
bool is_small_and_managed(const mx::array& x) {
  return x.status() == mx::array::Status::available && x.nbytes() > 0 &&
      x.nbytes() <= MANAGED_BYTES && x.flags().row_contiguous &&
      buffer_of(x).device == -1;
}

Launch& pending(void* pipeline) {
  return *static_cast<Launch*>(pipeline);
}

void bind(Launch& launch, const mx::array& x, int index) {
  launch.buffers[index] = address(x);
  launch.bound |= 1u << index;
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
  launch.encoder = &encoder(stream_);
  int device = stream_.device.index;
  std::lock_guard lock(mutex);
  auto it = kernels.find({device, name});
  if (it == kernels.end()) {
    it = kernels.emplace(std::pair(device, name), load(source, name, device))
             .first;
  }
  launch.kernel = it->second;
  launch.bound = 0;
  pipeline_ = &launch;
}

void Encoder::set_input_array(const mx::array& x, int index) {
  auto& launch = pending(pipeline_);
  launch.encoder->set_input_array(x);
  bind(launch, x, index);
}

void Encoder::set_output_array(mx::array& x, int index) {
  auto& launch = pending(pipeline_);
  launch.encoder->set_output_array(x);
  bind(launch, x, index);
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
  auto& launch = pending(pipeline_);
  auto next = launch.arguments.buffers;
  for (int i = 0; i < MAX_BUFFERS; ++i) {
    if (launch.bound >> i & 1) {
      *next++ = launch.buffers[i];
    }
  }
  void* all[] = {&launch.arguments};
  launch.encoder->add_kernel_node_raw(
      launch.kernel.function,
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

// One copy for each value: those that are drawn with are few, and the same
// again and again.
mx::array Encoder::resident(const mx::array& x) {
  using Key = std::tuple<int, size_t, uint64_t>; // stream, bytes, value
  static thread_local std::map<Key, mx::array> copies;
  if (!is_small_and_managed(x)) {
    return x;
  }
  uint64_t value = 0;
  std::memcpy(&value, address(x), x.nbytes());
  Key key = {stream_.index, x.nbytes(), value};
  auto it = copies.find(key);
  if (it == copies.end()) {
    if (copies.size() == MAX_RESIDENT) {
      for (auto& [_, copy] : copies) {
        add_temporary(copy);
      }
      copies.clear();
    }
    mx::array row({static_cast<int>(x.size())}, x.dtype(), nullptr, {});
    row.copy_shared_buffer(x, {1}, x.flags(), x.size());
    int times = MANAGED_BYTES / x.nbytes() + 1;
    auto lazy = mx::concatenate(std::vector(times, row), 0, stream_);
    eval(lazy);
    it = copies.emplace(key, lazy).first;
  }
  mx::array copy(x.shape(), x.dtype(), nullptr, {});
  copy.copy_shared_buffer(it->second, x.strides(), x.flags(), x.size());
  return copy;
}

void Encoder::keep(std::vector<std::shared_ptr<mx::array::Data>> used) {
  encoder(stream_).add_completed_handler([used = std::move(used)] {});
}

bool Encoder::can_keep() {
  return true;
}

void Encoder::add_temporary(const mx::array& x) {
  encoder(stream_).add_completed_handler([data = x.data_shared_ptr()] {});
}

} // namespace mlx_mtp::gpu
