// csrc/gpu/encoder.h on MLX's CPU backend and the emulator.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "gpu/encoder.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "primitives.h"
#include "recordings.h"

namespace {

namespace mx = mlx::core;

struct Binding {
  int index;
  // The whole buffer and where the array lies in it.
  char* buffer;
  size_t size;
  size_t offset;
  size_t nbytes;
  bool output;
};

struct Dispatch {
  std::string kernel;
  std::vector<Binding> bindings;
  std::map<int, std::vector<char>> bytes;
  uint32_t grid[3];
  uint32_t threads[3];
};

using Launch = const char* (*)(const char*,
                               const uint32_t*,
                               const uint32_t*,
                               void* const*,
                               int,
                               uint64_t);

// What the tests set and read.
struct Fake {
  std::mutex mutex;
  Launch launch{nullptr};
  int max_threads{1024};
  uint64_t seed{0};
  std::string fault;
  std::string log;
};

Fake& fake() {
  static Fake instance;
  return instance;
}

// A buffer's copy between two margins, aligned as Metal's buffers are.
class Guarded {
 public:
  explicit Guarded(const Binding& b) : memory_(b.size + 3 * PAGE, MARGIN) {
    auto at = reinterpret_cast<uintptr_t>(memory_.data());
    start_ = memory_.data() + (PAGE - at % PAGE) + PAGE;
    std::memcpy(start_, b.buffer, b.size);
    before_ = memory_;
  }

  char* data() {
    return start_;
  }

  void allow(const Binding& b) {
    allowed_.push_back({start_ + b.offset - memory_.data(), b.nbytes});
  }

  // Whether only what was allowed has changed.
  bool is_intact() {
    for (auto [at, n] : allowed_) {
      std::copy_n(memory_.begin() + at, n, before_.begin() + at);
    }
    return memory_ == before_;
  }

 private:
  static constexpr size_t PAGE = 4096;
  static constexpr char MARGIN = static_cast<char>(0xFF);

  std::vector<char> memory_;
  std::vector<char> before_;
  std::vector<std::pair<size_t, size_t>> allowed_;
  char* start_;
};

// A line for fake_device.py: the kernel and five lists of numbers.
void record(const Dispatch& d) {
  auto& log = fake().log;
  auto add = [&](auto n) { log += " " + std::to_string(n); };
  log += d.kernel + ":";
  for (auto n : d.grid) {
    add(n);
  }
  log += ":";
  add(d.threads[0]);
  for (bool output : {false, true}) {
    log += ":";
    for (auto& b : d.bindings) {
      if (b.output == output) {
        add(b.index);
      }
    }
  }
  log += ":";
  for (auto& [index, bytes] : d.bytes) {
    add(index);
    add(bytes.size());
  }
  log += "\n";
}

// Breaks a dispatch as a wrong host would, to see that a test notices.
void inject(const std::string& fault, Dispatch& d) {
  if (fault == "output as input") {
    for (auto& b : d.bindings) {
      b.output = false;
    }
  } else if (fault == "swapped inputs") {
    std::swap(d.bindings[0].index, d.bindings[1].index);
  } else if (fault == "wrong offset") {
    d.bindings[0].offset += 4;
  } else if (fault == "short grid") {
    --*std::max_element(d.grid, d.grid + 3);
  }
}

void run(Dispatch& d) {
  std::lock_guard lock(fake().mutex);
  inject(fake().fault, d);
  record(d);
  std::map<char*, Guarded> buffers;
  void* arguments[31] = {};
  for (auto& b : d.bindings) {
    auto& guarded = buffers.try_emplace(b.buffer, b).first->second;
    arguments[b.index] = guarded.data() + b.offset;
    if (b.output) {
      guarded.allow(b);
    }
  }
  for (auto& [index, bytes] : d.bytes) {
    arguments[index] = bytes.data();
  }
  auto* error = fake().launch(
      d.kernel.c_str(), d.grid, d.threads, arguments, 31, fake().seed);
  if (error) {
    throw std::runtime_error(d.kernel + ": " + error);
  }
  for (auto& b : d.bindings) {
    if (b.output) {
      std::memcpy(
          b.buffer + b.offset,
          buffers.at(b.buffer).data() + b.offset,
          b.nbytes);
    }
  }
  for (auto& b : d.bindings) {
    if (!buffers.at(b.buffer).is_intact()) {
      throw std::runtime_error(
          d.kernel + " writes outside of its outputs, in the buffer of " +
          std::to_string(b.index));
    }
  }
}

} // namespace

extern "C" __attribute__((visibility("default"))) void fake_device(
    const char* emulator,
    int max_threads,
    uint64_t seed,
    const char* fault) {
  std::lock_guard lock(fake().mutex);
  auto* library = dlopen(emulator, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    throw std::runtime_error(dlerror());
  }
  fake().launch = reinterpret_cast<Launch>(dlsym(library, "emulator_launch"));
  fake().max_threads = max_threads;
  fake().seed = seed;
  fake().fault = fault;
}

// What was dispatched since the last call, a line each.
extern "C" __attribute__((visibility("default"))) const char*
fake_device_log() {
  static std::string taken;
  std::lock_guard lock(fake().mutex);
  taken = std::exchange(fake().log, "");
  return taken.c_str();
}

namespace mlx_mtp {

namespace gpu {

namespace {

Dispatch& pending(void* pipeline) {
  return *static_cast<Dispatch*>(pipeline);
}

void bind(void* pipeline, const mx::array& x, int index, bool output) {
  auto* base = const_cast<char*>(x.data<char>()) - x.offset();
  pending(pipeline).bindings.push_back(
      {index,
       base,
       x.buffer_size(),
       static_cast<size_t>(x.offset()),
       x.nbytes(),
       output});
}

} // namespace

void Encoder::allocate(mx::array& x) {
  x.set_data(mx::allocator::malloc(x.nbytes()));
}

void Encoder::set_kernel(const KernelSource& source, const std::string& name) {
  static thread_local Dispatch dispatch;
  dispatch = {};
  dispatch.kernel = name;
  pipeline_ = &dispatch;
}

void Encoder::set_input_array(const mx::array& x, int index) {
  bind(pipeline_, x, index, false);
}

void Encoder::set_output_array(mx::array& x, int index) {
  bind(pipeline_, x, index, true);
}

void Encoder::set_bytes(const void* data, size_t size, int index) {
  auto* bytes = static_cast<const char*>(data);
  pending(pipeline_).bytes[index].assign(bytes, bytes + size);
}

int Encoder::threads(int best) const {
  return std::min(best, fake().max_threads / 32 * 32);
}

void Encoder::dispatch(int x, int y, int z, int threads) {
  if (x <= 0 || y <= 0 || z <= 0) {
    throw std::runtime_error(pending(pipeline_).kernel + ": empty grid");
  }
  auto task = pending(pipeline_);
  uint32_t grid[] = {uint32_t(x), uint32_t(y), uint32_t(z)};
  std::copy_n(grid, 3, task.grid);
  task.threads[0] = threads;
  task.threads[1] = task.threads[2] = 1;
  mx::cpu::get_command_encoder(stream_).dispatch(
      [task = std::move(task)]() mutable { run(task); });
}

void Encoder::eval(mx::array& lazy) {
  std::vector<mx::array> outputs = {lazy};
  lazy.primitive().eval_cpu(lazy.inputs(), outputs);
}

mx::array Encoder::resident(const mx::array& x) {
  return x;
}

void Encoder::add_temporary(const mx::array& x) {
  mx::cpu::get_command_encoder(stream_).add_temporary(x);
}

} // namespace gpu

// The ops take the GPU's path on the CPU's streams.

void CommitRows::eval_cpu(
    const std::vector<mx::array>& inputs,
    mx::array& out) {
  eval_gpu(inputs, out);
}

void GatedDeltaReplay::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  eval_gpu(inputs, outputs);
}

void Sample::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  eval_gpu(inputs, outputs);
}

void VerifyCoupled::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  eval_gpu(inputs, outputs);
}

void VerifyDraft::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  eval_gpu(inputs, outputs);
}

} // namespace mlx_mtp

// Only names for the package to import: nanobind takes a type from one module,
// and the package may have it already.
void bind_recordings(nanobind::module_& m) {
  using namespace nanobind::literals;
  auto nothing = nanobind::cpp_function([] {});
  auto types = nanobind::module_::import_("types");
  m.attr("Recordings") =
      types.attr("SimpleNamespace")("synchronize"_a = nothing);
}
