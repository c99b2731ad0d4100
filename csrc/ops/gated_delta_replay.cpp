#include "ops.h"
#include "ops/checks.h"
#include "primitives.h"

namespace mlx_mtp {

std::pair<mx::array, std::optional<mx::array>> gated_delta_replay(
    const mx::array& state,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const mx::array& steps,
    const std::optional<mx::array>& q,
    mx::StreamOrDevice s_) {
  const char* op = "gated_delta_replay";
  check_shape(op, "state", state, {{"B"}, {"Hv"}, {"Dv"}, {"Dk"}});
  check_dtype(op, "state", state, state.dtype() == mx::float32, "float32");
  int B = state.shape(0);
  int Hv = state.shape(1);
  int Dv = state.shape(2);
  int Dk = state.shape(3);
  check_shape(op, "k", k, {{"B", B}, {"T"}, {"Hk"}, {"Dk", Dk}});
  int T = k.shape(1);
  int Hk = k.shape(2);
  if (Hk == 0 || Hv % Hk != 0) {
    throw std::invalid_argument(
        "[gated_delta_replay] the " + std::to_string(Hv) +
        " value heads must be a multiple of the " + std::to_string(Hk) +
        " key heads.");
  }
  check_shape(op, "v", v, {{"B", B}, {"T", T}, {"Hv", Hv}, {"Dv", Dv}});
  check_shape(op, "g", g, {{"B", B}, {"T", T}, {"Hv", Hv}});
  check_shape(op, "beta", beta, {{"B", B}, {"T", T}, {"Hv", Hv}});
  check_shape(op, "steps", steps, {{"B", B}});
  check_float(op, "k", k);
  check_float(op, "v", v);
  check_float(op, "g", g);
  check_float(op, "beta", beta);

  auto stream = mx::to_stream(s_);
  auto primitive = std::make_shared<GatedDeltaReplay>(stream);
  std::vector<mx::array> inputs = {
      state, k, v, g, beta, to_int32(op, "steps", steps, stream)};
  if (!q) {
    auto out = mx::array(
        state.shape(), state.dtype(), std::move(primitive), std::move(inputs));
    return {out, std::nullopt};
  }
  check_shape(op, "q", *q, {{"B", B}, {"T", T}, {"Hk", Hk}, {"Dk", Dk}});
  check_float(op, "q", *q);
  inputs.push_back(*q);
  auto out = mx::array::make_arrays(
      {state.shape(), v.shape()},
      {state.dtype(), q->dtype()},
      std::move(primitive),
      inputs);
  return {out[0], out[1]};
}

std::vector<mx::Shape> GatedDeltaReplay::output_shapes(
    const std::vector<mx::array>& inputs) {
  if (inputs.size() == 6) {
    return {inputs[0].shape()};
  }
  return {inputs[0].shape(), inputs[2].shape()};
}

} // namespace mlx_mtp
