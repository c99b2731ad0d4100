#include "verify_draft.h"

// clang-format off
#define instantiate_verify_draft(name, type)                          \
  instantiate_kernel(                                                 \
      "verify_draft_partials_" #name, verify_draft_partials, type)    \
  instantiate_kernel(                                                 \
      "verify_draft_threshold_" #name, verify_draft_threshold, type, false) \
  instantiate_kernel(                                                 \
      "verify_draft_threshold_judged_" #name, verify_draft_threshold, type, true) \
  instantiate_kernel(                                                 \
      "verify_draft_residual_" #name, verify_draft_residual, type)    \
  instantiate_kernel(                                                 \
      "verify_draft_draw_" #name, verify_draft_draw, type, false)     \
  instantiate_kernel(                                                 \
      "verify_draft_draw_filtered_" #name, verify_draft_draw, type, true)

instantiate_verify_draft(float32, float)
instantiate_verify_draft(float16, half)
instantiate_verify_draft(bfloat16, bfloat) // clang-format on
