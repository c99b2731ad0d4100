// Checks of the arguments that sample and verify_draft share.
#pragma once

#include <optional>
#include <vector>

#include "ops.h"

namespace mlx_mtp {

// Whether params filter, or may filter because their values are not known yet.
bool may_filter(const SamplingParams& params);

// temperature, top_k, top_p and min_p as float32 arrays of shape () or
// (batch,). Scalars are checked here. An array value out of its range makes the
// rows that use it unusable.
std::vector<mx::array> param_arrays(
    const char* op,
    const SamplingParams& params,
    std::optional<int> batch,
    mx::Stream s);

// A bit mask over the vocabulary as uint32, with one row for each row of
// logits.
mx::array mask_array(
    const char* op,
    const mx::array& allowed,
    const mx::array& logits,
    mx::Stream s);

} // namespace mlx_mtp
