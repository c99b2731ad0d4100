#include "cuda/compile.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "cuda/driver.h"
#include "gpu_kernels.h"

namespace mlx_mtp::cuda {

namespace {

namespace fs = std::filesystem;

// Empty where the user has no folder for caches.
fs::path cache_folder() {
  if (auto* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache) {
    return fs::path(cache) / "mlx_mtp";
  }
  if (auto* home = std::getenv("HOME"); home && *home) {
    return fs::path(home) / ".cache" / "mlx_mtp";
  }
  return {};
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Other processes see the whole file or none. A cache that can not be written
// is none.
void write(const fs::path& path, const std::string& code) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  auto unfinished = path;
  unfinished += "." + std::to_string(getpid());
  std::ofstream file(unfinished, std::ios::binary);
  file << code;
  file.close();
  if (file) {
    fs::rename(unfinished, path, error);
  }
  fs::remove(unfinished, error);
}

std::string log_of(_nvrtcProgram* program) {
  size_t size = 0;
  compiler().nvrtcGetProgramLogSize(program, &size);
  std::string log(size, '\0');
  compiler().nvrtcGetProgramLog(program, log.data());
  return log.c_str();
}

// Products and sums are not fused: all dispatches must round alike.
std::string run_compiler(
    const KernelSource& source,
    const std::string& name,
    const std::string& architecture) {
  auto& nvrtc = compiler();
  auto text = std::string(source.text) + "\ncompile_kernel(" + name + ")\n";
  const char* header = kernels::metal_stdlib.text;
  const char* header_name = "metal_stdlib";
  _nvrtcProgram* program = nullptr;
  if (nvrtc.nvrtcCreateProgram(
          &program, text.c_str(), source.name, 1, &header, &header_name)) {
    throw std::runtime_error("[gpu] NVRTC could not be started.");
  }
  std::unique_ptr<_nvrtcProgram*, void (*)(_nvrtcProgram**)> owner(
      &program, [](auto* p) { compiler().nvrtcDestroyProgram(p); });
  auto target = "--gpu-architecture=" + architecture;
  std::vector<const char*> options = {
      target.c_str(), "--std=c++20", "--fmad=false"};
  if (nvrtc.nvrtcCompileProgram(program, options.size(), options.data())) {
    throw std::runtime_error(
        "[gpu] NVRTC could not compile " + name + " for " + architecture +
        ": " + log_of(program));
  }
  size_t size = 0;
  nvrtc.nvrtcGetCUBINSize(program, &size);
  std::string code(size, '\0');
  nvrtc.nvrtcGetCUBIN(program, code.data());
  return code;
}

} // namespace

std::string compile(
    const KernelSource& source,
    const std::string& name,
    int major,
    int minor,
    bool anew) {
  auto architecture = "sm_" + std::to_string(10 * major + minor);
  int version[2];
  compiler().nvrtcVersion(&version[0], &version[1]);
  auto folder = cache_folder();
  auto path = folder /
      (name + "-" + source.hash + kernels::metal_stdlib.hash + "-" +
       architecture + "-" + std::to_string(version[0]) + "." +
       std::to_string(version[1]) + ".cubin");
  if (!folder.empty() && !anew) {
    if (auto code = read(path); !code.empty()) {
      return code;
    }
  }
  auto code = run_compiler(source, name, architecture);
  if (!folder.empty()) {
    write(path, code);
  }
  return code;
}

} // namespace mlx_mtp::cuda
