#include "ops/checks.h"
#include "ops/params.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

mx::Shape leading(const mx::array& logits) {
  return mx::Shape(logits.shape().begin(), logits.shape().end() - 1);
}

mx::Shape with_last(mx::Shape shape, int size) {
  shape.push_back(size);
  return shape;
}

} // namespace

std::pair<mx::array, mx::array> sample(
    const mx::array& logits,
    const mx::array& uniforms,
    const SamplingParams& params,
    const std::optional<mx::array>& allowed,
    mx::StreamOrDevice s_) {
  const char* op = "sample";
  auto s = mx::to_stream(s_);
  if (logits.ndim() == 0 || logits.shape(-1) == 0) {
    throw std::invalid_argument(
        "[sample] logits must have a last axis with at least one value.");
  }
  check_float(op, "logits", logits);
  auto rows = leading(logits);
  check_shape(op, "uniforms", uniforms, with_last(rows, 2));
  check_dtype(
      op, "uniforms", uniforms, uniforms.dtype() == mx::float32, "float32");

  std::optional<int> batch;
  if (!rows.empty()) {
    batch = rows[0];
  }
  std::vector<mx::array> inputs = {logits, uniforms};
  for (auto& p : param_arrays(op, params, batch, s)) {
    inputs.push_back(p);
  }
  if (allowed) {
    inputs.push_back(mask_array(op, *allowed, logits, s));
  }
  auto outputs = mx::array::make_arrays(
      {rows, with_last(rows, 3)},
      {mx::int32, mx::float32},
      std::make_shared<Sample>(
          s, params.temperature_first, may_filter(params), allowed.has_value()),
      inputs);
  return {outputs[0], outputs[1]};
}

bool Sample::is_equivalent(const mx::Primitive& other) const {
  auto& o = static_cast<const Sample&>(other);
  return temperature_first_ == o.temperature_first_ &&
      filtered_ == o.filtered_ && has_allowed_ == o.has_allowed_;
}

std::vector<mx::Shape> Sample::output_shapes(
    const std::vector<mx::array>& inputs) {
  auto rows = leading(inputs[0]);
  return {rows, with_last(rows, 3)};
}

} // namespace mlx_mtp
