// Kernel text to machine code.
#pragma once

#include <string>

#include "kernel_source.h"

namespace mlx_mtp::cuda {

// The machine code of one kernel for a GPU of compute capability major.minor:
// by NVRTC, or as an earlier process left it in the user's cache folder, unless
// `anew`.
std::string compile(
    const KernelSource& source,
    const std::string& name,
    int major,
    int minor,
    bool anew);

} // namespace mlx_mtp::cuda
