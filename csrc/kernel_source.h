// GPU kernel text that the build embeds, see cmake/embed.cmake.
#pragma once

namespace mlx_mtp {

// One translation unit with our own headers flattened in.
struct KernelSource {
  const char* name;
  // Of the text: a cache that is keyed by it never serves stale code.
  const char* hash;
  const char* text;
};

} // namespace mlx_mtp
