// What the host and the kernels share: constant arguments and scratch records.
// Plain 4-byte fields only, so that every compiler lays them out alike.
#pragma once

// One chunk of a row (or, combined, a whole row) of logits.
struct Partial {
  float max; // the largest logit
  float sum; // sum of exp(z - max)
  float scaled_sum; // sum of exp((z - max) / temperature)
  int best; // greedy: the lowest id that has the largest logit; else one near
            // it; -1: NaN or +inf
};

// p(z) = scale * exp((z - ref) * inv_t) where z >= threshold, else 0; or all
// mass on one id.
struct Density {
  float ref;
  float inv_t;
  float threshold;
  float scale;
  int point; // the id with all mass, or -1
  int usable; // 0: nothing can be drawn
  float sum; // of exp(z - ref), without filters
  int flawed; // 1: a draft row with NaN or +inf
  int few; // with filters: the number of candidates if they are few, else -1
};

// Where a sequence stops and what is drawn there.
struct Decision {
  Density target;
  Density draft; // without meaning after a bonus
  int row; // number of drafts accepted before, -1: unusable
  int accepted; // 1: the draft of this row as well, so that it does not stop
                // here
  int bonus; // 1: no draft left, draw from the target alone
  float z; // the logit of the draft
};

// The first of some tokens in a race, see verify_coupled.
struct Racer {
  float time;
  int id;
};

struct SampleParams {
  int vocab; // V
  int chunk; // logits a threadgroup of sample_partials, a multiple of 256
  int chunks; // ceil(V / chunk)
  int groups; // ceil(V / 256)
  int rows_per_param; // rows that share one value of the parameters
  int filtered; // 0 only if no row has a filter
  int temperature_first;
  int has_allowed;
  int aligned; // every row of logits starts at a multiple of 16 bytes
  // Strides in elements. The last axes of logits, uniforms and allowed are
  // contiguous.
  int logits_stride;
  int uniforms_stride;
  int allowed_stride;
  int temperature_stride; // 0 for a scalar
  int top_k_stride;
  int top_p_stride;
  int min_p_stride;
};

struct VerifyDraftParams {
  int vocab; // V
  int chunk; // logits a threadgroup of verify_draft_partials, a multiple of 256
  int chunks; // ceil(V / chunk)
  int groups; // ceil(V / 256)
  int part; // groups whose weights a simdgroup of verify_draft_residual sums
  int batch; // B
  int drafts; // K
  int filtered; // 0 only if no row has a filter
  int temperature_first;
  int has_draft_logits;
  int has_draft_stats;
  int has_draft_lengths;
  int has_allowed;
  int has_logprobs; // 0: they are not wanted
  int aligned; // every row of target and draft starts at a multiple of 16 bytes
  // Strides in elements. The last axes of the logits, uniforms, draft_stats and
  // allowed are contiguous.
  int target_strides[2];
  int draft_strides[2];
  int allowed_strides[2];
  int tokens_strides[2];
  int stats_strides[2];
  int uniforms_stride;
  int lengths_stride;
  int temperature_stride; // 0 for a scalar
  int top_k_stride;
  int top_p_stride;
  int min_p_stride;
  int draft_temperature_stride;
};

struct VerifyCoupledParams {
  VerifyDraftParams verify; // without draft logits
  int seed_stride;
  int position_stride;
};

struct CommitRowsParams {
  int heads; // H
  int slots; // S
  int rows; // T
  int units; // D in units of the kernel
  int ring;
  int start_stride;
  int count_stride;
  int rows_strides[3]; // of B, H, T, in units
};

struct GatedDeltaReplayParams {
  int steps; // T
  int key_heads; // Hk
  int value_heads; // Hv
  int key_dim; // Dk
  int value_dim; // Dv
  int has_q;
  int aligned; // every row of state, k and q starts at a multiple of 4 elements
  int steps_stride;
  // Strides of B, T, H in elements. The last axes of k, v and q are contiguous.
  int k_strides[3];
  int v_strides[3];
  int g_strides[3];
  int beta_strides[3];
  int q_strides[3];
};
