#include <string>

#include "gpu/verify.h"
#include "gpu_kernels.h"

namespace mlx_mtp {

namespace {

using gpu::Grid;

// Buffers 0 to 11 of the kernels. The target stands for an input that is
// absent.
std::vector<mx::array> input_buffers(
    gpu::Encoder& encoder,
    const std::vector<mx::array>& inputs,
    const VerifyDraft::Optional& has) {
  auto next = inputs.begin() + 8;
  auto take = [&](bool present) { return present ? *next++ : inputs[0]; };
  auto draft = take(has.draft_logits);
  auto stats = take(has.draft_stats);
  auto lengths = take(has.draft_lengths);
  auto allowed = take(has.allowed);
  bool same = draft.dtype() == inputs[0].dtype();
  auto logits = [&](const mx::array& x) {
    auto y = same ? x : gpu::cast(encoder, x, mx::float32);
    return gpu::rows(encoder, y);
  };
  auto target = logits(inputs[0]);
  return {
      target,
      has.draft_logits ? logits(draft) : target,
      inputs[1],
      gpu::rows(encoder, inputs[2]),
      encoder.resident(inputs[3]),
      encoder.resident(inputs[4]),
      encoder.resident(inputs[5]),
      encoder.resident(inputs[6]),
      encoder.resident(inputs[7]),
      has.draft_stats ? gpu::rows(encoder, stats) : target,
      lengths,
      has.allowed ? gpu::rows(encoder, allowed) : target};
}

} // namespace

void VerifyDraft::eval_gpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  gpu::Encoder encoder(stream());
  for (auto& out : outputs) {
    encoder.allocate(out);
  }
  int B = inputs[0].shape(0);
  int T = inputs[0].shape(1);
  if (B == 0) {
    return;
  }
  auto buffers = input_buffers(encoder, inputs, has_);
  int rows = B * T + (has_.draft_logits ? B * (T - 1) : 0);
  auto params = gpu::verify_params(
      buffers, rows, temperature_first_, filtered_, logprobs_, has_);
  int64_t decisions = int64_t(filtered_ ? B * T : B) * sizeof(gpu::Decision);
  auto scratch = gpu::verify_scratch(
      encoder, params, rows, int64_t(B) * params.groups * 8, decisions);
  buffers.insert(buffers.end(), scratch.begin(), scratch.end());
  buffers.insert(buffers.end(), outputs.begin(), outputs.end());
  buffers.back() = logprobs_ ? outputs[2] : outputs[0];

  std::string type = gpu::type_name(buffers[0].dtype());
  gpu::Kernels kernels(
      encoder, kernels::verify_draft, params, std::move(buffers));
  gpu::shape_rows(kernels, type, params, rows, true);
  if (!filtered_) {
    kernels.run(
        "verify_draft_residual_" + type,
        {0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 17},
        {15, 16, 20},
        256,
        [&](int threads) {
          return Grid{
              B, gpu::ceil_div(params.groups, params.part * threads / 32)};
        });
  }
  int threads = filtered_ ? 256 : gpu::threads_for(params.groups);
  kernels.run(
      (filtered_ ? "verify_draft_draw_filtered_" : "verify_draft_draw_") + type,
      {0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 15, 16, 17},
      {18, 19, 20},
      threads,
      [&](int) { return Grid{B}; });
}

} // namespace mlx_mtp
