#include "verify_coupled.h"

// clang-format off
#define instantiate_verify_coupled(name, type)                               \
  instantiate_kernel(                                                        \
      "verify_coupled_race_" #name, verify_coupled_race, type, false)        \
  instantiate_kernel(                                                        \
      "verify_coupled_race_filtered_" #name, verify_coupled_race, type, true) \
  instantiate_kernel(                                                        \
      "verify_coupled_finish_" #name, verify_coupled_finish, type, false)    \
  instantiate_kernel(                                                        \
      "verify_coupled_finish_filtered_" #name, verify_coupled_finish, type, true)

instantiate_verify_coupled(float32, float)
instantiate_verify_coupled(float16, half)
instantiate_verify_coupled(bfloat16, bfloat) // clang-format on
