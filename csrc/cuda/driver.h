// The few functions of the CUDA driver and of NVRTC that are called, found at
// run time: libmlx has loaded both, and building needs neither.
#pragma once

#include <cstddef>

struct CUmod_st;
struct CUfunc_st;
struct _nvrtcProgram;

namespace mlx_mtp::cuda {

struct Driver {
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  int (*cuModuleLoadData)(CUmod_st** module, const void* image);
  int (*cuModuleGetFunction)(CUfunc_st** f, CUmod_st* module, const char* name);
  int (*cuFuncGetAttribute)(int* value, int attribute, CUfunc_st* f);
  int (*cuGetErrorString)(int error, const char** text);
};

struct Compiler {
  int (*nvrtcVersion)(int* major, int* minor);
  int (*nvrtcCreateProgram)(
      _nvrtcProgram** program,
      const char* text,
      const char* name,
      int headers,
      const char* const* header_texts,
      const char* const* header_names);
  int (*nvrtcCompileProgram)(
      _nvrtcProgram* program,
      int options,
      const char* const* option_texts);
  int (*nvrtcGetProgramLogSize)(_nvrtcProgram* program, size_t* size);
  int (*nvrtcGetProgramLog)(_nvrtcProgram* program, char* log);
  int (*nvrtcGetCUBINSize)(_nvrtcProgram* program, size_t* size);
  int (*nvrtcGetCUBIN)(_nvrtcProgram* program, char* code);
  int (*nvrtcDestroyProgram)(_nvrtcProgram** program);
};

const Driver& driver();
const Compiler& compiler();

// Throws with the driver's own words unless `error` is 0.
void check(const char* what, int error);

} // namespace mlx_mtp::cuda
