// The operations of mlx-mtp. Each is lazy, differentiable nowhere, works
// on any stream and under mx.compile, and never evaluates on the host.
//
// Dims: B sequences, K drafts, T = K + 1 verified positions, V vocabulary,
// H heads, D head dim, S cache slots. Floating inputs are float32, float16 or
// bfloat16 with any strides; math is in float32 or wider. Token ids are int32.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_mtp {

namespace mx = mlx::core;

// A number for all sequences or an array of shape () or [B], B the first axis.
using Param = std::variant<float, mx::array>;

// The shaped distribution of one row z of logits, one definition for target and
// draft. temperature_first: z / temperature, keep the top_k largest,
// renormalise, keep the smallest set {z >= t} with mass >= top_p, keep
// probabilities >= min_p times the largest, renormalise. temperature_last:
// top_p, min_p and top_k each measured on the full row at temperature 1, then
// / temperature and renormalise. Ties at a threshold are all kept. Temperature
// 0, and any so small that its inverse overflows float32, is the argmax, lowest
// id on ties. top_k 0, top_p 1 and min_p 0 are off.
struct SamplingParams {
  Param temperature = 1.0f;
  Param top_k = 0.0f;
  Param top_p = 1.0f;
  Param min_p = 0.0f;
  bool temperature_first = true;
};

// Draws one token a row: the first id, in order, whose running sum of
// probabilities exceeds u[0] + u[1] / 2^24.
// logits [..., V], uniforms [..., 2] float32, allowed [..., ceil(V / 32)]
// uint32 or int32, bit i % 32 of word i / 32 for token i
// -> tokens [...] int32,
//    stats [..., 3] float32: log-sum-exp over the survivors in units of
//    z / temperature, threshold in raw logit units, 1 / temperature; (0, max,
//    inf) at temperature 0
// A row with NaN, +inf, no finite logit or a parameter out of range has token
// -1 and stats NaN.
std::pair<mx::array, mx::array> sample(
    const mx::array& logits,
    const mx::array& uniforms,
    const SamplingParams& params = {},
    const std::optional<mx::array>& allowed = std::nullopt,
    mx::StreamOrDevice s = {});

// Exact speculative verification (Leviathan et al. 2023, Chen et al. 2023):
// accepts draft i while u[i] * q(draft) < p(draft), then draws a correction
// from max(p - q, 0), from p if that is empty, or a bonus from the next row.
// target_logits [B, T, V], draft_tokens [B, K] integers, draft_logits [B, K, V]
// or none (point-mass drafts), uniforms [B, K + 2] float32: K coins and the
// final draw, draft_stats [B, K, 3] float32 from sample(), required for
// filtered drafts, draft_lengths [B] integers, allowed [B, T, ceil(V / 32)]
// -> tokens [B, T] int32, -1 after the last emitted one
//    accepted [B] int32, -1 for a sequence whose rows are unusable
//    logprobs [B, T] float32 of the emitted tokens: the target's log-softmax
//    after masks, before temperature and filters; 0 after the last one; [B, 0]
//    if they are not wanted
// Rows after the first rejection do not count. Without draft_stats the draft
// has the temperature of draft_params, else of the target, and no filters. At
// target temperature 0 the draft logits are not read.
std::tuple<mx::array, mx::array, mx::array> verify_draft(
    const mx::array& target_logits,
    const mx::array& draft_tokens,
    const std::optional<mx::array>& draft_logits,
    const mx::array& uniforms,
    const std::optional<mx::array>& draft_stats = std::nullopt,
    const SamplingParams& params = {},
    const std::optional<SamplingParams>& draft_params = std::nullopt,
    const std::optional<mx::array>& draft_lengths = std::nullopt,
    const std::optional<mx::array>& allowed = std::nullopt,
    bool logprobs = true,
    mx::StreamOrDevice s = {});

// Coupled verification: the token at a position is the argmax over the shaped
// support of z / temperature + Gumbel noise that depends on seed, position and
// id alone (Maddison et al. 2014), so a stream is the same for every drafter
// and depth and for plain sampling. A draft is accepted if it is that token.
// target_logits [B, T, V], draft_tokens [B, K] integers, seed [B, 2] uint32,
// position [B] integers: that of the first row's token, the others follow,
// draft_lengths [B] integers, allowed [B, T, ceil(V / 32)]
// -> tokens, accepted and logprobs as verify_draft
// The noise of a token is -log(e), e exponential from the 64 bits that
// Threefry-2x32-20 with key seed[b] gives for the counter (position, id).
std::tuple<mx::array, mx::array, mx::array> verify_coupled(
    const mx::array& target_logits,
    const mx::array& draft_tokens,
    const mx::array& seed,
    const mx::array& position,
    const SamplingParams& params = {},
    const std::optional<mx::array>& draft_lengths = std::nullopt,
    const std::optional<mx::array>& allowed = std::nullopt,
    mx::StreamOrDevice s = {});

// Writes the first count[b] staged rows at start[b] (modulo ring when ring >
// 0). Starts and counts are clamped: nothing is written outside. cache [B, H,
// S, D], rows [B, H, T, D], start [B], count [B]
// -> cache, in place when it is donated
mx::array commit_rows(
    const mx::array& cache,
    const mx::array& rows,
    const mx::array& start,
    const mx::array& count,
    int ring = 0,
    mx::StreamOrDevice s = {});

// The Gated DeltaNet state after the first steps[b] steps.
// state [B, Hv, Dv, Dk] float32, k [B, T, Hk, Dk], v [B, T, Hv, Dv],
// g [B, T, Hv], beta [B, T, Hv], steps [B] int32, q [B, T, Hk, Dk]
// -> state, in place when it is donated and q is not given
//    y [B, T, Hv, Dv] when q is given, zero from steps[b] on
std::pair<mx::array, std::optional<mx::array>> gated_delta_replay(
    const mx::array& state,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const mx::array& steps,
    const std::optional<mx::array>& q = std::nullopt,
    mx::StreamOrDevice s = {});

} // namespace mlx_mtp
