// The one header that knows which compiler reads the kernels. Everywhere but in
// Metal a stand-in for metal_stdlib brings these macros along.
#pragma once

#include <metal_stdlib>

#ifdef __METAL_VERSION__
#define TG_ARRAY(T, name, N) threadgroup T name[N]
// For what is seldom called: small code starts faster.
#define METAL_FUNC_SLOW __attribute__((noinline))
// clang-format off
#define instantiate_kernel(name, func, ...) \
  template [[host_name(name)]] kernel       \
      decltype(func<__VA_ARGS__>) func<__VA_ARGS__>; // clang-format on
#endif

using namespace metal;

// A thread's place in its threadgroup.
struct Team {
  uint thread_index;
  uint threads;
  uint lane;
  uint simdgroup;
  uint simdgroups;
};

METAL_FUNC Team make_team(uint thread_index, uint threads) {
  return Team{
      thread_index,
      threads,
      thread_index % 32,
      thread_index / 32,
      threads / 32};
}

// The lanes for which x holds, as bits.
METAL_FUNC uint lanes_where(bool x) {
  return uint(simd_vote::vote_t(simd_ballot(x)));
}
