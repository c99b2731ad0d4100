#include <string>

#include "metal/arguments.h"
#include "metal_kernels.h"
#include "mlx/allocator.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

using metal::Grid;

// Buffers 0 to 11 of the kernels. The target stands for an input that is
// absent.
std::vector<mx::array> input_buffers(
    metal::Encoder& encoder,
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
    auto y = same ? x : metal::cast(encoder, x, mx::float32);
    return metal::rows(encoder, y);
  };
  auto target = logits(inputs[0]);
  return {
      target,
      has.draft_logits ? logits(draft) : target,
      inputs[1],
      metal::rows(encoder, inputs[2]),
      inputs[3],
      inputs[4],
      inputs[5],
      inputs[6],
      inputs[7],
      has.draft_stats ? metal::rows(encoder, stats) : target,
      lengths,
      has.allowed ? metal::rows(encoder, allowed) : target};
}

void set_strides(int (&strides)[2], const mx::array& x) {
  strides[0] = metal::stride(x, 0);
  strides[1] = metal::stride(x, 1);
}

metal::VerifyDraftParams make_params(
    const std::vector<mx::array>& in,
    bool temperature_first,
    bool filtered,
    const VerifyDraft::Optional& has) {
  int V = in[0].shape(2);
  metal::VerifyDraftParams params = {};
  params.vocab = V;
  params.chunk = metal::CHUNK;
  params.chunks = metal::ceil_div(V, metal::CHUNK);
  params.groups = metal::ceil_div(V, metal::GROUP);
  params.batch = in[0].shape(0);
  params.drafts = in[0].shape(1) - 1;
  params.filtered = filtered;
  params.temperature_first = temperature_first;
  params.has_draft_logits = has.draft_logits;
  params.has_draft_stats = has.draft_stats;
  params.has_draft_lengths = has.draft_lengths;
  params.has_allowed = has.allowed;
  params.aligned = metal::is_aligned(in[0]) && metal::is_aligned(in[1]);
  params.uniforms_stride = metal::stride(in[3], 0);
  params.lengths_stride = metal::stride(in[10], 0);
  params.temperature_stride = metal::stride(in[4], 0);
  params.top_k_stride = metal::stride(in[5], 0);
  params.top_p_stride = metal::stride(in[6], 0);
  params.min_p_stride = metal::stride(in[7], 0);
  params.draft_temperature_stride = metal::stride(in[8], 0);
  set_strides(params.target_strides, in[0]);
  set_strides(params.draft_strides, in[1]);
  set_strides(params.tokens_strides, in[2]);
  set_strides(params.stats_strides, in[9]);
  set_strides(params.allowed_strides, in[11]);
  return params;
}

// Buffers 12 to 16. One that is not used stands for the others.
std::vector<mx::array> scratch_buffers(
    metal::Encoder& encoder,
    const metal::VerifyDraftParams& p,
    int rows) {
  auto bytes = [&](int n, size_t size) {
    return metal::scratch(encoder, {n, static_cast<int>(size)}, mx::uint8);
  };
  int B = p.batch;
  int BT = B * (p.drafts + 1);
  auto partials = bytes(rows * p.chunks, sizeof(metal::Partial));
  if (p.filtered) {
    auto maxima = metal::scratch(encoder, {BT, p.groups}, mx::float32);
    auto densities = bytes(BT, sizeof(metal::Density));
    return {partials, maxima, densities, partials, partials};
  }
  auto sums = metal::scratch(encoder, {B, p.chunks}, mx::uint64);
  auto decisions = bytes(B, sizeof(metal::Decision));
  return {partials, partials, partials, sums, decisions};
}

} // namespace

void VerifyDraft::eval_gpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  int B = inputs[0].shape(0);
  int T = inputs[0].shape(1);
  if (B == 0) {
    return;
  }
  metal::Encoder encoder(stream());
  auto buffers = input_buffers(encoder, inputs, has_);
  auto params = make_params(buffers, temperature_first_, filtered_, has_);
  int rows = B * T + (has_.draft_logits ? B * (T - 1) : 0);
  auto scratch = scratch_buffers(encoder, params, rows);
  buffers.insert(buffers.end(), scratch.begin(), scratch.end());
  buffers.insert(buffers.end(), outputs.begin(), outputs.end());

  std::string type = metal::type_name(buffers[0].dtype());
  metal::Kernels kernels(
      encoder, kernels::verify_draft, params, std::move(buffers));
  auto grid = [](int x, int y = 1) { return [=](int) { return Grid{x, y}; }; };
  kernels.run(
      "verify_draft_partials_" + type,
      {0, 1, 4, 8, 9, 10, 11},
      {12, 13},
      256,
      grid(rows, params.chunks));
  if (filtered_) {
    kernels.run(
        "verify_draft_threshold_" + type,
        {0, 4, 5, 6, 7, 10, 11, 12, 13},
        {14},
        1024,
        grid(B * T));
  } else {
    kernels.run(
        "verify_draft_residual_" + type,
        {0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14},
        {15, 16, 19},
        256,
        grid(params.chunks, B));
  }
  kernels.run(
      "verify_draft_draw_" + type,
      {0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14, 15, 16},
      {17, 18, 19},
      filtered_ ? 1024 : 256,
      grid(B));
}

} // namespace mlx_mtp
