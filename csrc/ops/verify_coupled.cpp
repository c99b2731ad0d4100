#include "ops/checks.h"
#include "ops/params.h"
#include "primitives.h"

namespace mlx_mtp {

std::tuple<mx::array, mx::array, mx::array> verify_coupled(
    const mx::array& target_logits,
    const mx::array& draft_tokens,
    const mx::array& seed,
    const mx::array& position,
    const SamplingParams& params,
    const std::optional<mx::array>& draft_lengths,
    const std::optional<mx::array>& allowed,
    mx::StreamOrDevice s_) {
  const char* op = "verify_coupled";
  auto s = mx::to_stream(s_);
  check_shape(op, "target_logits", target_logits, {{"B"}, {"T"}, {"V"}});
  if (target_logits.shape(1) == 0 || target_logits.shape(2) == 0) {
    throw std::invalid_argument(
        "[verify_coupled] target_logits must have T = K + 1 > 0 and V > 0 but "
        "has shape " +
        to_string(target_logits.shape()) + ".");
  }
  check_float(op, "target_logits", target_logits);
  int B = target_logits.shape(0);
  int K = target_logits.shape(1) - 1;
  check_shape(op, "draft_tokens", draft_tokens, {{"B", B}, {"K", K}});
  check_shape(op, "seed", seed, {{"B", B}, {"2", 2}});
  check_dtype(op, "seed", seed, seed.dtype() == mx::uint32, "uint32");
  check_shape(op, "position", position, {{"B", B}});

  std::vector<mx::array> inputs = {
      target_logits,
      to_int32(op, "draft_tokens", draft_tokens, s),
      seed,
      to_int32(op, "position", position, s)};
  for (auto& p : param_arrays(op, params, B, s)) {
    inputs.push_back(p);
  }
  if (draft_lengths) {
    check_shape(op, "draft_lengths", *draft_lengths, {{"B", B}});
    inputs.push_back(to_int32(op, "draft_lengths", *draft_lengths, s));
  }
  if (allowed) {
    inputs.push_back(mask_array(op, *allowed, target_logits, s));
  }
  auto outputs = mx::array::make_arrays(
      {{B, K + 1}, {B}, {B, K + 1}},
      {mx::int32, mx::int32, mx::float32},
      std::make_shared<VerifyCoupled>(
          s,
          params.temperature_first,
          may_filter(params),
          draft_lengths.has_value(),
          allowed.has_value()),
      inputs);
  return {outputs[0], outputs[1], outputs[2]};
}

bool VerifyCoupled::is_equivalent(const mx::Primitive& other) const {
  auto& o = static_cast<const VerifyCoupled&>(other);
  return temperature_first_ == o.temperature_first_ &&
      filtered_ == o.filtered_ && has_lengths_ == o.has_lengths_ &&
      has_allowed_ == o.has_allowed_;
}

std::vector<mx::Shape> VerifyCoupled::output_shapes(
    const std::vector<mx::array>& inputs) {
  int B = inputs[0].shape(0);
  int T = inputs[0].shape(1);
  return {{B, T}, {B}, {B, T}};
}

} // namespace mlx_mtp
