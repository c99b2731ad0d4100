// What the verifying ops share: how every row of the target is shaped.
#pragma once

#include "gpu/arguments.h"
#include "primitives.h"

namespace mlx_mtp::gpu {

// From buffers 0 to 11 of verify_draft. `rows` counts those of target and
// draft.
VerifyDraftParams verify_params(
    const std::vector<mx::array>& in,
    int rows,
    bool temperature_first,
    bool filtered,
    bool logprobs,
    const VerifyDraft::Optional& has);

// Buffers 12 to 17: what shape_rows() leaves, `sums` bytes if there are no
// filters, and `last` bytes. Those that are not used have one byte.
std::vector<mx::array> verify_scratch(
    Encoder& encoder,
    const VerifyDraftParams& params,
    int rows,
    int64_t sums,
    int64_t last);

// The dispatches in front of the decision: sums of the chunks, thresholds.
void shape_rows(
    Kernels<VerifyDraftParams>& kernels,
    const std::string& type,
    const VerifyDraftParams& params,
    int rows,
    bool judged);

} // namespace mlx_mtp::gpu
