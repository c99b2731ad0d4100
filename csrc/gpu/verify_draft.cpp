#include <string>

#include "gpu/arguments.h"
#include "gpu_kernels.h"
#include "primitives.h"

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
      inputs[3],
      inputs[4],
      inputs[5],
      inputs[6],
      inputs[7],
      has.draft_stats ? gpu::rows(encoder, stats) : target,
      lengths,
      has.allowed ? gpu::rows(encoder, allowed) : target};
}

void set_strides(int (&strides)[2], const mx::array& x) {
  strides[0] = gpu::stride(x, 0);
  strides[1] = gpu::stride(x, 1);
}

gpu::VerifyDraftParams make_params(
    const std::vector<mx::array>& in,
    int rows,
    bool temperature_first,
    bool filtered,
    const VerifyDraft::Optional& has) {
  int V = in[0].shape(2);
  gpu::VerifyDraftParams params = {};
  params.vocab = V;
  params.chunk = gpu::chunk_size(rows, V);
  params.chunks = gpu::ceil_div(V, params.chunk);
  params.groups = gpu::ceil_div(V, gpu::GROUP);
  params.batch = in[0].shape(0);
  params.drafts = in[0].shape(1) - 1;
  params.filtered = filtered;
  params.temperature_first = temperature_first;
  params.has_draft_logits = has.draft_logits;
  params.has_draft_stats = has.draft_stats;
  params.has_draft_lengths = has.draft_lengths;
  params.has_allowed = has.allowed;
  params.aligned = gpu::is_aligned(in[0]) && gpu::is_aligned(in[1]);
  params.uniforms_stride = gpu::stride(in[3], 0);
  params.lengths_stride = gpu::stride(in[10], 0);
  params.temperature_stride = gpu::stride(in[4], 0);
  params.top_k_stride = gpu::stride(in[5], 0);
  params.top_p_stride = gpu::stride(in[6], 0);
  params.min_p_stride = gpu::stride(in[7], 0);
  params.draft_temperature_stride = gpu::stride(in[8], 0);
  set_strides(params.target_strides, in[0]);
  set_strides(params.draft_strides, in[1]);
  set_strides(params.tokens_strides, in[2]);
  set_strides(params.stats_strides, in[9]);
  set_strides(params.allowed_strides, in[11]);
  return params;
}

// Buffers 12 to 16. Those that are not used have one byte.
std::vector<mx::array> scratch_buffers(
    gpu::Encoder& encoder,
    const gpu::VerifyDraftParams& p,
    int rows) {
  int64_t B = p.batch;
  int64_t BT = B * (p.drafts + 1);
  int64_t parts = p.chunks * (p.chunk / gpu::PART);
  int64_t partials = int64_t(rows) * p.chunks * sizeof(gpu::Partial);
  std::vector<int64_t> sizes = {
      partials, 1, 1, B * parts * 8, B * int64_t(sizeof(gpu::Decision))};
  if (p.filtered) {
    int64_t maxima = BT * p.groups * 4;
    int64_t densities = BT * sizeof(gpu::Density);
    sizes = {partials, maxima, densities, BT * gpu::FEW * 8, 1};
  }
  return gpu::scratch(encoder, sizes);
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
  auto params = make_params(buffers, rows, temperature_first_, filtered_, has_);
  auto scratch = scratch_buffers(encoder, params, rows);
  buffers.insert(buffers.end(), scratch.begin(), scratch.end());
  buffers.insert(buffers.end(), outputs.begin(), outputs.end());

  std::string type = gpu::type_name(buffers[0].dtype());
  gpu::Kernels kernels(
      encoder, kernels::verify_draft, params, std::move(buffers));
  auto grid = [](int x, int y = 1) { return [=](int) { return Grid{x, y}; }; };
  kernels.run(
      "verify_draft_partials_" + type,
      {0, 1, 4, 8, 9, 10, 11},
      {12, 13},
      128,
      grid(rows, params.chunks));
  if (filtered_) {
    kernels.run(
        "verify_draft_threshold_" + type,
        {0, 4, 5, 6, 7, 10, 11, 12, 13},
        {14, 15},
        512,
        grid(B * T));
  } else {
    kernels.run(
        "verify_draft_residual_" + type,
        {0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14},
        {15, 16, 19},
        256,
        grid(B, params.chunks));
  }
  kernels.run(
      (filtered_ ? "verify_draft_draw_filtered_" : "verify_draft_draw_") + type,
      {0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14, 15, 16},
      {17, 18, 19},
      256,
      grid(B));
}

} // namespace mlx_mtp
