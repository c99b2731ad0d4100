#include "cuda/driver.h"

#include <dlfcn.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

namespace mlx_mtp::cuda {

namespace {

void* open(std::initializer_list<const char*> names) {
  for (auto* name : names) {
    if (auto* library = dlopen(name, RTLD_LAZY)) {
      return library;
    }
  }
  throw std::runtime_error(
      std::string("[gpu] ") + *names.begin() +
      " was not found. It comes with the packages of mlx[cuda13], or with the "
      "NVIDIA driver.");
}

template <typename F>
void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function) {
    throw std::runtime_error(
        std::string("[gpu] The installed CUDA libraries have no ") + name +
        ".");
  }
}

} // namespace

const Driver& driver() {
  static const Driver driver = [] {
    Driver d;
    auto* library = open({"libcuda.so.1"});
    find(library, "cuDeviceGetAttribute", d.cuDeviceGetAttribute);
    find(library, "cuModuleLoadData", d.cuModuleLoadData);
    find(library, "cuModuleGetFunction", d.cuModuleGetFunction);
    find(library, "cuFuncGetAttribute", d.cuFuncGetAttribute);
    find(library, "cuGetErrorString", d.cuGetErrorString);
    return d;
  }();
  return driver;
}

const Compiler& compiler() {
  static const Compiler compiler = [] {
    Compiler c;
    auto* library = open({"libnvrtc.so.13", "libnvrtc.so.12"});
    find(library, "nvrtcVersion", c.nvrtcVersion);
    find(library, "nvrtcCreateProgram", c.nvrtcCreateProgram);
    find(library, "nvrtcCompileProgram", c.nvrtcCompileProgram);
    find(library, "nvrtcGetProgramLogSize", c.nvrtcGetProgramLogSize);
    find(library, "nvrtcGetProgramLog", c.nvrtcGetProgramLog);
    find(library, "nvrtcGetCUBINSize", c.nvrtcGetCUBINSize);
    find(library, "nvrtcGetCUBIN", c.nvrtcGetCUBIN);
    find(library, "nvrtcDestroyProgram", c.nvrtcDestroyProgram);
    return c;
  }();
  return compiler;
}

void check(const char* what, int error) {
  if (error != 0) {
    const char* text = nullptr;
    driver().cuGetErrorString(error, &text);
    throw std::runtime_error(
        std::string("[gpu] ") + what + " failed: " +
        (text ? text : "CUDA error " + std::to_string(error)) + ".");
  }
}

} // namespace mlx_mtp::cuda
