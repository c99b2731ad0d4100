#include "gated_delta_replay.h"

// clang-format off
#define instantiate_gated_delta_replay(name, type)                             \
  instantiate_kernel(                                                          \
      "gated_delta_replay_" #name "_128_1", gated_delta_replay, type, 128, 1)  \
  instantiate_kernel(                                                          \
      "gated_delta_replay_" #name "_128_2", gated_delta_replay, type, 128, 2)  \
  instantiate_kernel(                                                          \
      "gated_delta_replay_" #name "_256_1", gated_delta_replay, type, 256, 1)

instantiate_gated_delta_replay(float32, float)
instantiate_gated_delta_replay(float16, half)
instantiate_gated_delta_replay(bfloat16, bfloat) // clang-format on
