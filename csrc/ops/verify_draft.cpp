#include "ops/checks.h"
#include "ops/params.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

constexpr const char* op = "verify_draft";

void check_draft(
    const std::optional<mx::array>& draft_logits,
    const std::optional<mx::array>& draft_stats,
    const std::optional<SamplingParams>& draft_params,
    const mx::Shape& shape) {
  if (!draft_logits) {
    if (draft_stats || draft_params) {
      throw std::invalid_argument(
          "[verify_draft] draft_stats and draft_params need draft_logits.");
    }
    return;
  }
  check_float(op, "draft_logits", *draft_logits);
  check_shape(
      op,
      "draft_logits",
      *draft_logits,
      {{"B", shape[0]}, {"K", shape[1]}, {"V", shape[2]}});
  if (draft_stats) {
    check_shape(
        op,
        "draft_stats",
        *draft_stats,
        {{"B", shape[0]}, {"K", shape[1]}, {"3", 3}});
    check_dtype(
        op,
        "draft_stats",
        *draft_stats,
        draft_stats->dtype() == mx::float32,
        "float32");
  } else if (draft_params && may_filter(*draft_params)) {
    throw std::invalid_argument(
        "[verify_draft] Filtered drafts need the draft_stats that sample() "
        "returned with them.");
  }
}

} // namespace

std::tuple<mx::array, mx::array, mx::array> verify_draft(
    const mx::array& target_logits,
    const mx::array& draft_tokens,
    const std::optional<mx::array>& draft_logits,
    const mx::array& uniforms,
    const std::optional<mx::array>& draft_stats,
    const SamplingParams& params,
    const std::optional<SamplingParams>& draft_params,
    const std::optional<mx::array>& draft_lengths,
    const std::optional<mx::array>& allowed,
    bool logprobs,
    mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  check_shape(op, "target_logits", target_logits, {{"B"}, {"T"}, {"V"}});
  if (target_logits.shape(1) == 0 || target_logits.shape(2) == 0) {
    throw std::invalid_argument(
        "[verify_draft] target_logits must have T = K + 1 > 0 and V > 0 but "
        "has "
        "shape " +
        to_string(target_logits.shape()) + ".");
  }
  check_float(op, "target_logits", target_logits);
  int B = target_logits.shape(0);
  int K = target_logits.shape(1) - 1;
  int V = target_logits.shape(2);
  check_shape(op, "draft_tokens", draft_tokens, {{"B", B}, {"K", K}});
  check_shape(op, "uniforms", uniforms, {{"B", B}, {"K + 2", K + 2}});
  check_dtype(
      op, "uniforms", uniforms, uniforms.dtype() == mx::float32, "float32");
  check_draft(draft_logits, draft_stats, draft_params, {B, K, V});

  std::vector<mx::array> inputs = {
      target_logits, to_int32(op, "draft_tokens", draft_tokens, s), uniforms};
  for (auto& p : param_arrays(op, params, B, s)) {
    inputs.push_back(p);
  }
  inputs.push_back(
      draft_params ? param_arrays(op, *draft_params, B, s)[0] : inputs[3]);
  if (draft_logits) {
    inputs.push_back(*draft_logits);
  }
  if (draft_stats) {
    inputs.push_back(*draft_stats);
  }
  if (draft_lengths) {
    check_shape(op, "draft_lengths", *draft_lengths, {{"B", B}});
    inputs.push_back(to_int32(op, "draft_lengths", *draft_lengths, s));
  }
  if (allowed) {
    inputs.push_back(mask_array(op, *allowed, target_logits, s));
  }
  VerifyDraft::Optional has = {
      draft_logits.has_value(),
      draft_stats.has_value(),
      draft_lengths.has_value(),
      allowed.has_value()};
  auto outputs = mx::array::make_arrays(
      {{B, K + 1}, {B}, {B, logprobs ? K + 1 : 0}},
      {mx::int32, mx::int32, mx::float32},
      std::make_shared<VerifyDraft>(
          s, params.temperature_first, may_filter(params), logprobs, has),
      inputs);
  return {outputs[0], outputs[1], outputs[2]};
}

bool VerifyDraft::is_equivalent(const mx::Primitive& other) const {
  auto& o = static_cast<const VerifyDraft&>(other);
  return temperature_first_ == o.temperature_first_ &&
      filtered_ == o.filtered_ && logprobs_ == o.logprobs_ && has_ == o.has_;
}

std::vector<mx::Shape> VerifyDraft::output_shapes(
    const std::vector<mx::array>& inputs) {
  int B = inputs[0].shape(0);
  int T = inputs[0].shape(1);
  return {{B, T}, {B}, {B, logprobs_ ? T : 0}};
}

} // namespace mlx_mtp
