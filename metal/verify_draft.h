// Exact verification of drafted tokens. First dispatch: the sums of every chunk
// of every row. Second, without filters: every threadgroup finds the row where
// its sequence stops and sums some parts of what is drawn there; with filters:
// one threadgroup a target row finds its threshold. Third: one threadgroup a
// sequence draws and writes the results.
#pragma once

#include "draw.h"
#include "threshold.h"

template <typename T, bool FILTERED>
struct VerifyInputs {
  const device T* target_logits;
  const device T* draft_logits;
  const device int* draft_tokens;
  const device float* uniforms;
  const device float* temperature;
  const device float* draft_temperature;
  const device float* draft_stats;
  const device int* draft_lengths;
  const device uint* allowed;
  const device Partial* partials;
  const device float* maxima; // with filters
  const device Density* densities; // with filters
};

METAL_FUNC int draft_length(
    const device int* draft_lengths,
    constant VerifyDraftParams& params,
    int b) {
  return params.has_draft_lengths != 0
      ? draft_lengths[long(b) * params.lengths_stride]
      : params.drafts;
}

template <typename T>
METAL_FUNC Row<T> target_row(
    const device T* logits,
    const device uint* allowed,
    constant VerifyDraftParams& params,
    int b,
    int i) {
  return Row<T>{
      logits + long(b) * params.target_strides[0] +
          long(i) * params.target_strides[1],
      allowed + long(b) * params.allowed_strides[0] +
          long(i) * params.allowed_strides[1],
      params.vocab,
      params.aligned != 0,
      params.has_allowed != 0};
}

template <typename T>
METAL_FUNC Row<T> draft_row(
    const device T* logits,
    const device uint* allowed,
    constant VerifyDraftParams& params,
    int b,
    int i) {
  return Row<T>{
      logits + long(b) * params.draft_strides[0] +
          long(i) * params.draft_strides[1],
      allowed,
      params.vocab,
      params.aligned != 0,
      false};
}

// Rows of partials: the B * T of the target, then the B * K of the draft.
METAL_FUNC const device Partial* target_partials(
    const device Partial* partials,
    constant VerifyDraftParams& params,
    int b,
    int i) {
  long r = long(b) * (params.drafts + 1) + i;
  return partials + r * params.chunks;
}

METAL_FUNC const device Partial* draft_partials(
    const device Partial* partials,
    constant VerifyDraftParams& params,
    int b,
    int i) {
  long r =
      long(params.batch) * (params.drafts + 1) + long(b) * params.drafts + i;
  return partials + r * params.chunks;
}

// 1 / temperature and threshold of what draft i was drawn from, see
// inverse_temperature(). The log-sum-exp in the stats is too coarse at low
// temperatures: it is summed anew.
METAL_FUNC Scaling draft_scaling(
    const device float* stats,
    const device float* temperature,
    constant VerifyDraftParams& params,
    int b,
    int i) {
  if (params.has_draft_stats == 0) {
    float t = temperature[b * params.draft_temperature_stride];
    return make_scaling(inverse_temperature(t), -INFINITY, false);
  }
  stats +=
      long(b) * params.stats_strides[0] + long(i) * params.stats_strides[1];
  return make_scaling(
      is_unusable(stats[0]) ? -1.0f : stats[2], stats[1], false);
}

template <typename T>
kernel void verify_draft_partials(
    const device T* target_logits [[buffer(0)]],
    const device T* draft_logits [[buffer(1)]],
    const device float* temperature [[buffer(4)]],
    const device float* draft_temperature [[buffer(8)]],
    const device float* draft_stats [[buffer(9)]],
    const device int* draft_lengths [[buffer(10)]],
    const device uint* allowed [[buffer(11)]],
    device Partial* partials [[buffer(12)]],
    device float* maxima [[buffer(13)]],
    constant VerifyDraftParams& params [[buffer(20)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  TG_ARRAY(Partial, scratch, 32);
  int rows = params.drafts + 1;
  int r = int(position.x);
  bool draft = r >= params.batch * rows;
  int q = r - params.batch * rows;
  int b = draft ? q / params.drafts : r / rows;
  int i = draft ? q % params.drafts : r % rows;
  // Rows that can not be reached are not read.
  int length = draft_length(draft_lengths, params, b);
  if (draft ? i >= length : i > length) {
    return;
  }
  Team team = make_team(thread_index, threads.x);
  Share<T> share = share_of(
      draft ? draft_row(draft_logits, allowed, params, b, i)
            : target_row(target_logits, allowed, params, b, i),
      int(position.y),
      params.chunk,
      team);
  // Read before what waits for the temperature.
  Eights<BATCH> some = load_batch(share, share.begin, team.lane);
  Scaling scaling = draft
      ? draft_scaling(draft_stats, draft_temperature, params, b, i)
      : make_scaling(
            inverse_temperature(temperature[b * params.temperature_stride]),
            -INFINITY,
            true);
  reduce_chunk(
      share,
      some,
      scaling,
      params.filtered != 0 && !draft,
      maxima + long(r) * params.groups,
      partials + long(r) * params.chunks + int(position.y),
      scratch,
      team);
}

// An id and its logit in one word.
METAL_FUNC ulong make_candidate(int id, float z) {
  return (ulong(uint(id)) << 32) | ulong(as_type<uint>(z));
}

METAL_FUNC int candidate_id(ulong x) {
  return int(uint(x >> 32));
}

METAL_FUNC float candidate_logit(ulong x) {
  return as_type<float>(uint(x));
}

template <typename T>
kernel void verify_draft_threshold(
    const device T* target_logits [[buffer(0)]],
    const device float* temperature [[buffer(4)]],
    const device float* top_k [[buffer(5)]],
    const device float* top_p [[buffer(6)]],
    const device float* min_p [[buffer(7)]],
    const device int* draft_lengths [[buffer(10)]],
    const device uint* allowed [[buffer(11)]],
    const device Partial* partials [[buffer(12)]],
    const device float* maxima [[buffer(13)]],
    device Density* densities [[buffer(14)]],
    device ulong* few [[buffer(15)]],
    constant VerifyDraftParams& params [[buffer(20)]],
    uint r [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  TG_ARRAY(atomic_uint, histogram, 2 * BINS);
  TG_ARRAY(ulong, sums, 32);
  TG_ARRAY(int, ids, FEW);
  TG_ARRAY(float, candidates, FEW);
  TG_ARRAY(ulong, weights, FEW);
  TG_ARRAY(atomic_uint, shared, 8);
  Team team = make_team(thread_index, threads);
  int b = int(r) / (params.drafts + 1);
  int i = int(r) % (params.drafts + 1);
  if (i > draft_length(draft_lengths, params, b)) {
    return;
  }
  Sampling sampling = {
      temperature[b * params.temperature_stride],
      top_k[b * params.top_k_stride],
      top_p[b * params.top_p_stride],
      min_p[b * params.min_p_stride],
      params.temperature_first != 0};
  Partial whole = combine(
      target_partials(partials, params, b, i),
      params.chunks,
      finite_inverse(inverse_temperature(sampling.temperature)),
      team.lane);
  Maxima groups = {maxima + long(r) * params.groups, params.groups};
  Density d = apply_filters(
      target_row(target_logits, allowed, params, b, i),
      groups,
      whole,
      sampling,
      Workspace{
          histogram, sums, Few{ids, candidates, weights, shared, FEW + 1}},
      team);
  for (int j = int(team.thread_index); j < d.few; j += int(team.threads)) {
    few[long(r) * FEW + j] = make_candidate(ids[j], candidates[j]);
  }
  if (team.thread_index == 0) {
    densities[r] = d;
  }
}

// With stats an accepted draft needs nothing of its row but its own logit.
METAL_FUNC Density
make_draft_density(Partial row, Scaling scaling, bool has_stats, int token) {
  if (scaling.greedy) {
    return point_density(token);
  }
  bool flawed = row.best < 0;
  row.best = flawed && has_stats ? 0 : row.best;
  Density d = make_density(row, scaling.inv_t, scaling.floor);
  d.flawed = flawed ? 1 : 0;
  return d;
}

METAL_FUNC Decision unusable_decision() {
  Density d = unusable_density();
  return Decision{d, d, -1, 0, 0, 0.0f};
}

// What happens in row i if all drafts before it were accepted, in every lane.
template <typename T, bool FILTERED>
METAL_FUNC Decision judge(
    VerifyInputs<T, FILTERED> in,
    constant VerifyDraftParams& params,
    int b,
    int i,
    int length,
    uint lane) {
  // As far as possible no read waits for another one.
  int token = 0;
  float u = 0.0f;
  if (i < length) {
    token = in.draft_tokens
                [long(b) * params.tokens_strides[0] +
                 long(i) * params.tokens_strides[1]];
    u = in.uniforms[long(b) * params.uniforms_stride + i];
  }
  const device Partial* of_target = target_partials(in.partials, params, b, i);
  const device Partial* of_draft = draft_partials(in.partials, params, b, i);
  bool has_draft = params.has_draft_logits != 0 && i < length;
  int j = int(lane);
  int target_chunks = FILTERED ? 0 : params.chunks;
  int draft_chunks = has_draft ? params.chunks : 0;
  Partial target = load_partial(of_target, j, target_chunks);
  Partial more_target = load_partial(of_target, j + 32, target_chunks);
  Partial draft = load_partial(of_draft, j, draft_chunks);
  Partial more_draft = load_partial(of_draft, j + 32, draft_chunks);
  bool in_range = token >= 0 && token < params.vocab;
  int id = in_range ? token : 0;
  float z = load1(target_row(in.target_logits, in.allowed, params, b, i), id);
  float y = 0.0f;
  Scaling scaling = make_scaling(INFINITY, -INFINITY, false);
  if (has_draft) {
    y = load1(draft_row(in.draft_logits, in.allowed, params, b, i), id);
    scaling = draft_scaling(in.draft_stats, in.draft_temperature, params, b, i);
  }
  float inv_t =
      inverse_temperature(in.temperature[b * params.temperature_stride]);
  float finite = finite_inverse(inv_t);
  target = merge(target, more_target, finite);
  draft = merge(draft, more_draft, scaling.inv_t);
#pragma unroll 1
  for (j += 64; j < params.chunks; j += 32) {
    target = merge(target, load_partial(of_target, j, target_chunks), finite);
    draft =
        merge(draft, load_partial(of_draft, j, draft_chunks), scaling.inv_t);
  }
  target = simd_merge(target, finite);
  draft = simd_merge(draft, scaling.inv_t);
  Decision d = unusable_decision();
  if (FILTERED) {
    d.target = in.densities[b * (params.drafts + 1) + i];
  } else {
    d.target = make_density(target, inv_t, -INFINITY);
  }
  if (d.target.usable == 0) {
    return d;
  }
  if (i == length) {
    d.row = i;
    d.bonus = 1;
    return d;
  }
  if (!in_range) {
    return d;
  }
  float p = probability(d.target, token, z);
  bool accepted = p > 0.0f;
  if (d.target.point < 0) {
    bool has_stats = params.has_draft_stats != 0;
    d.draft = make_draft_density(draft, scaling, has_stats, token);
    float q = 1.0f;
    if (d.draft.usable != 0 && d.draft.point < 0) {
      // A probability may be too small for a float: what was kept counts.
      bool usable = is_kept(d.draft, y) && !is_unusable(y);
      d.draft.usable = usable ? 1 : 0;
      q = probability(d.draft, token, y);
    }
    if (d.draft.usable == 0) {
      return d;
    }
    accepted = u * metal::min(q, 1.0f) < p;
    if (!accepted && d.draft.flawed != 0) {
      return d;
    }
  }
  d.row = i;
  d.accepted = accepted ? 1 : 0;
  d.z = z;
  return d;
}

// Where sequence b stops, in every thread. Each simdgroup judges one row at a
// time. With `logprobs` wanted, those of the accepted drafts are written.
template <typename T, bool FILTERED>
METAL_FUNC Decision decide(
    VerifyInputs<T, FILTERED> in,
    constant VerifyDraftParams& params,
    int b,
    bool want_logprobs,
    device float* logprobs,
    threadgroup Decision* rows,
    Team team) {
  int length = draft_length(in.draft_lengths, params, b);
  if (length < 0 || length > params.drafts) {
    return unusable_decision();
  }
  int step = int(team.simdgroups);
  for (int first = 0; first <= length; first += step) {
    int i = first + int(team.simdgroup);
    if (i <= length) {
      Decision mine = judge(in, params, b, i, length, team.lane);
      if (team.lane == 0) {
        rows[team.simdgroup] = mine;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int count = metal::min(step, length + 1 - first);
    int stop = 0;
    while (stop < count && rows[stop].accepted != 0) {
      ++stop;
    }
    int mine = int(team.thread_index);
    if (want_logprobs && mine < stop) {
      logprobs[long(b) * (params.drafts + 1) + first + mine] =
          log_softmax(rows[mine].target, rows[mine].z);
    }
    if (stop < count) {
      return rows[stop];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  return unusable_decision();
}

template <typename T, bool FILTERED>
METAL_FUNC Weights<T, FILTERED> weights_of(
    VerifyInputs<T, FILTERED> in,
    constant VerifyDraftParams& params,
    int b,
    Decision d) {
  int draft_index = metal::min(d.row, metal::max(params.drafts - 1, 0));
  return Weights<T, FILTERED>{
      target_row(in.target_logits, in.allowed, params, b, d.row),
      draft_row(in.draft_logits, in.allowed, params, b, draft_index),
      d.target,
      d.draft,
      d.bonus == 0,
      in.maxima + (long(b) * (params.drafts + 1) + d.row) * params.groups};
}

template <typename T>
kernel void verify_draft_residual(
    const device T* target_logits [[buffer(0)]],
    const device T* draft_logits [[buffer(1)]],
    const device int* draft_tokens [[buffer(2)]],
    const device float* uniforms [[buffer(3)]],
    const device float* temperature [[buffer(4)]],
    const device float* draft_temperature [[buffer(8)]],
    const device float* draft_stats [[buffer(9)]],
    const device int* draft_lengths [[buffer(10)]],
    const device uint* allowed [[buffer(11)]],
    const device Partial* partials [[buffer(12)]],
    const device float* maxima [[buffer(13)]],
    const device Density* densities [[buffer(14)]],
    device ulong* part_sums [[buffer(15)]],
    device Decision* decisions [[buffer(16)]],
    device float* logprobs [[buffer(19)]],
    constant VerifyDraftParams& params [[buffer(20)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  TG_ARRAY(Decision, rows, 32);
  Team team = make_team(thread_index, threads.x);
  int b = int(position.x);
  VerifyInputs<T, false> in = {
      target_logits,
      draft_logits,
      draft_tokens,
      uniforms,
      temperature,
      draft_temperature,
      draft_stats,
      draft_lengths,
      allowed,
      partials,
      maxima,
      densities};
  bool first = position.y == 0;
  Decision d = decide(in, params, b, first, logprobs, rows, team);
  if (first && team.thread_index == 0) {
    decisions[b] = d;
  }
  int part = int(position.y * team.simdgroups + team.simdgroup);
  if (part >= params.parts) {
    return;
  }
  ulong sum = 0;
  if (d.row >= 0 && d.target.point < 0) {
    Weights<T, false> x = weights_of(in, params, b, d);
    int begin = part * params.part;
    sum = sum_part(x, begin, begin + params.part, team.lane);
  }
  if (team.lane == 0) {
    part_sums[long(b) * params.parts + part] = sum;
  }
}

// What drawing needs in threadgroup memory.
struct DrawSpace {
  threadgroup ulong* sums; // 32
  threadgroup int* result;
  // With filters, FEW each.
  threadgroup int* ids;
  threadgroup float* z;
  threadgroup ulong* weights;
};

// The token drawn from the candidates of a row, -1 if none has a weight.
template <typename T, bool FILTERED>
METAL_FUNC int draw_candidates(
    Weights<T, FILTERED> x,
    const device ulong* candidates,
    int count,
    ulong u,
    DrawSpace space,
    Team team) {
  for (int i = int(team.thread_index); i < count; i += int(team.threads)) {
    space.ids[i] = candidate_id(candidates[i]);
    space.z[i] = candidate_logit(candidates[i]);
  }
  return draw_few(
      x, space.ids, space.z, space.weights, count, u, space.result, team);
}

// The token drawn where the sequence stops, below 0 if unusable. `words` has
// the weights of the parts, or with filters the candidates of every row.
template <typename T, bool FILTERED>
METAL_FUNC int draw_token(
    VerifyInputs<T, FILTERED> in,
    constant VerifyDraftParams& params,
    int b,
    Decision d,
    const device ulong* words,
    Pick part,
    ulong u,
    DrawSpace space,
    Team team) {
  if (d.row < 0) {
    return -1;
  }
  if (d.target.point >= 0) {
    return d.target.point;
  }
  Weights<T, FILTERED> x = weights_of(in, params, b, d);
  bool known = !FILTERED || d.target.few >= 0;
  int token = -1;
  if (!FILTERED) {
    int begin = part.lane * params.part;
    int end = part.lane < 0 ? begin : begin + params.part;
    token =
        find_in_part(x, begin, end, part.rest, space.sums, space.result, team);
  } else if (known) {
    words += (long(b) * (params.drafts + 1) + d.row) * FEW;
    token = draw_candidates(x, words, d.target.few, u, space, team);
  }
#pragma unroll 1
  for (int i = known ? 1 : 0; i < 2 && token < 0; ++i) {
    // At last without q: where nothing is left of p it is q up to rounding.
    x.residual = x.residual && i == 0;
    token = draw_row(x, u, space.sums, space.result, team);
  }
  return token;
}

template <typename T, bool FILTERED>
METAL_FUNC void write_results(
    VerifyInputs<T, FILTERED> in,
    constant VerifyDraftParams& params,
    int b,
    Decision d,
    int token,
    device int* tokens,
    device int* accepted,
    device float* logprobs,
    Team team) {
  int size = params.drafts + 1;
  int row = token < 0 ? -1 : d.row;
  for (int i = int(team.thread_index); i < size; i += int(team.threads)) {
    long at = long(b) * size + i;
    if (i < row) {
      tokens[at] = in.draft_tokens
                       [long(b) * params.tokens_strides[0] +
                        long(i) * params.tokens_strides[1]];
    } else if (i == row) {
      tokens[at] = token;
      logprobs[at] = log_softmax(
          d.target,
          load1(target_row(in.target_logits, in.allowed, params, b, i), token));
    } else {
      tokens[at] = -1;
      logprobs[at] = 0.0f;
    }
  }
  if (team.thread_index == 0) {
    accepted[b] = row;
  }
}

template <typename T, bool FILTERED>
kernel void verify_draft_draw(
    const device T* target_logits [[buffer(0)]],
    const device T* draft_logits [[buffer(1)]],
    const device int* draft_tokens [[buffer(2)]],
    const device float* uniforms [[buffer(3)]],
    const device float* temperature [[buffer(4)]],
    const device float* draft_temperature [[buffer(8)]],
    const device float* draft_stats [[buffer(9)]],
    const device int* draft_lengths [[buffer(10)]],
    const device uint* allowed [[buffer(11)]],
    const device Partial* partials [[buffer(12)]],
    const device float* maxima [[buffer(13)]],
    const device Density* densities [[buffer(14)]],
    const device ulong* words [[buffer(15)]],
    const device Decision* decisions [[buffer(16)]],
    device int* tokens [[buffer(17)]],
    device int* accepted [[buffer(18)]],
    device float* logprobs [[buffer(19)]],
    constant VerifyDraftParams& params [[buffer(20)]],
    uint position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  TG_ARRAY(Decision, rows, 32);
  TG_ARRAY(ulong, sums, 32);
  TG_ARRAY(int, result, 1);
  TG_ARRAY(Pick, found, 1);
  TG_ARRAY(int, ids, FILTERED ? FEW : 1);
  TG_ARRAY(float, z, FILTERED ? FEW : 1);
  TG_ARRAY(ulong, weights, FILTERED ? FEW : 1);
  Team team = make_team(thread_index, threads);
  int b = int(position);
  VerifyInputs<T, FILTERED> in = {
      target_logits,
      draft_logits,
      draft_tokens,
      uniforms,
      temperature,
      draft_temperature,
      draft_stats,
      draft_lengths,
      allowed,
      partials,
      maxima,
      densities};
  // As far as possible no read waits for another one.
  const device float* pair =
      uniforms + long(b) * params.uniforms_stride + params.drafts;
  ulong u = fine_uniform(pair[0], pair[1]);
  Decision d;
  Pick part = {-1, 0ul};
  if (FILTERED) {
    d = decide(in, params, b, true, logprobs, rows, team);
  } else {
    d = decisions[b];
    words += long(b) * params.parts;
    part = pick_part(words, params.parts, u, sums, found, team);
  }
  DrawSpace space = {sums, result, ids, z, weights};
  int token = draw_token(in, params, b, d, words, part, u, space, team);
  threadgroup_barrier(mem_flags::mem_device);
  write_results(in, params, b, d, token, tokens, accepted, logprobs, team);
}
