#include "gpu/verify.h"

namespace mlx_mtp::gpu {

namespace {

void set_strides(int (&strides)[2], const mx::array& x) {
  strides[0] = stride(x, 0);
  strides[1] = stride(x, 1);
}

} // namespace

VerifyDraftParams verify_params(
    const std::vector<mx::array>& in,
    int rows,
    bool temperature_first,
    bool filtered,
    bool logprobs,
    const VerifyDraft::Optional& has) {
  int V = in[0].shape(2);
  VerifyDraftParams params = {};
  params.vocab = V;
  params.chunk = chunk_size(rows, V);
  params.chunks = ceil_div(V, params.chunk);
  params.groups = ceil_div(V, GROUP);
  params.batch = in[0].shape(0);
  params.part = part_size(int64_t(params.batch) * params.groups);
  params.drafts = in[0].shape(1) - 1;
  params.filtered = filtered;
  params.temperature_first = temperature_first;
  params.has_draft_logits = has.draft_logits;
  params.has_draft_stats = has.draft_stats;
  params.has_draft_lengths = has.draft_lengths;
  params.has_allowed = has.allowed;
  params.has_logprobs = logprobs;
  params.aligned = is_aligned(in[0]) && is_aligned(in[1]);
  params.uniforms_stride = stride(in[3], 0);
  params.lengths_stride = stride(in[10], 0);
  params.temperature_stride = stride(in[4], 0);
  params.top_k_stride = stride(in[5], 0);
  params.top_p_stride = stride(in[6], 0);
  params.min_p_stride = stride(in[7], 0);
  params.draft_temperature_stride = stride(in[8], 0);
  set_strides(params.target_strides, in[0]);
  set_strides(params.draft_strides, in[1]);
  set_strides(params.tokens_strides, in[2]);
  set_strides(params.stats_strides, in[9]);
  set_strides(params.allowed_strides, in[11]);
  return params;
}

std::vector<mx::array> verify_scratch(
    Encoder& encoder,
    const VerifyDraftParams& params,
    int rows,
    int64_t sums,
    int64_t last) {
  int64_t partials = int64_t(rows) * params.chunks * sizeof(Partial);
  int64_t drafted = int64_t(rows) * 4;
  if (!params.filtered) {
    return scratch(encoder, {partials, 1, 1, sums, last, drafted});
  }
  int64_t BT = int64_t(params.batch) * (params.drafts + 1);
  return scratch(
      encoder,
      {partials,
       BT * params.groups * 4,
       BT * int64_t(sizeof(Density)),
       BT * FEW * 8,
       last,
       drafted});
}

void shape_rows(
    Kernels<VerifyDraftParams>& kernels,
    const std::string& type,
    const VerifyDraftParams& params,
    int rows,
    bool judged) {
  kernels.run(
      "verify_draft_partials_" + type,
      {0, 1, 2, 4, 8, 9, 10, 11},
      {12, 13, 17},
      128,
      [&](int) { return Grid{rows, params.chunks}; });
  if (params.filtered) {
    kernels.run(
        (judged ? "verify_draft_threshold_judged_"
                : "verify_draft_threshold_") +
            type,
        {0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17},
        {14, 15, 16},
        threshold_threads(rows, params.vocab),
        [&](int) { return Grid{params.batch * (params.drafts + 1)}; });
  }
}

} // namespace mlx_mtp::gpu
