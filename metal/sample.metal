#include "sample.h"

// clang-format off
#define instantiate_sample(name, type)                                \
  instantiate_kernel("sample_partials_" #name, sample_partials, type) \
  instantiate_kernel("sample_draw_" #name, sample_draw, type, false)  \
  instantiate_kernel(                                                 \
      "sample_draw_filtered_" #name, sample_draw, type, true)

instantiate_sample(float32, float)
instantiate_sample(float16, half)
instantiate_sample(bfloat16, bfloat) // clang-format on
