// Exact verification of drafted tokens. First dispatch: the sums of every chunk
// of every row. Second, without filters: every threadgroup finds the row where
// its sequence stops and sums some parts of what is drawn there; with filters:
// one threadgroup a target row finds its threshold and decides about its draft.
// Third: one threadgroup a sequence draws and writes the results.
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
  const device Partial* partials; // the target's rows, then the draft's
  const device float* maxima; // with filters
  const device float* drafted; // each row's logit of its draft
};

METAL_FUNC int draft_length(
    const device int* draft_lengths,
    constant VerifyDraftParams& params,
    int b) {
  return params.has_draft_lengths != 0
      ? draft_lengths[long(b) * params.lengths_stride]
      : params.drafts;
}

METAL_FUNC int draft_token(
    const device int* draft_tokens,
    constant VerifyDraftParams& params,
    int b,
    int i) {
  return draft_tokens
      [long(b) * params.tokens_strides[0] + long(i) * params.tokens_strides[1]];
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
    const device int* draft_tokens [[buffer(2)]],
    const device float* temperature [[buffer(4)]],
    const device float* draft_temperature [[buffer(8)]],
    const device float* draft_stats [[buffer(9)]],
    const device int* draft_lengths [[buffer(10)]],
    const device uint* allowed [[buffer(11)]],
    device Partial* partials [[buffer(12)]],
    device float* maxima [[buffer(13)]],
    device float* drafted [[buffer(17)]],
    constant VerifyDraftParams& params [[buffer(21)]],
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
  int chunk = int(position.y);
  Row<T> row = draft ? draft_row(draft_logits, allowed, params, b, i)
                     : target_row(target_logits, allowed, params, b, i);
  Share<T> share = share_of(row, chunk, params.chunk, team);
  // Read before what waits for the temperature.
  Eights<BATCH> some = load_batch(share, share.begin, team.lane);
  // The logit of the draft, if it is one of these.
  bool here = false;
  float z = 0.0f;
  if (i < metal::min(length, params.drafts)) {
    int token = draft_token(draft_tokens, params, b, i);
    token = token >= 0 && token < params.vocab ? token : 0;
    here = token >= chunk * params.chunk && token < share.end;
    z = here ? load1(row, token) : 0.0f;
  }
  // Of the logits as they are: for log-probabilities and filters before the
  // temperature.
  bool plain = params.has_logprobs != 0 || params.temperature_first == 0;
  Scaling scaling = draft
      ? draft_scaling(draft_stats, draft_temperature, params, b, i)
      : make_scaling(
            inverse_temperature(temperature[b * params.temperature_stride]),
            -INFINITY,
            plain);
  reduce_chunk(
      share,
      some,
      scaling,
      params.filtered != 0 && !draft,
      maxima + long(r) * params.groups,
      partials + long(r) * params.chunks + chunk,
      scratch,
      team);
  if (here && team.thread_index == 0) {
    drafted[r] = z;
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

// What a decision about row i needs to know of its draft.
struct Drafted {
  int token;
  float u;
  float z; // logits of the draft: in the target,
  float y; // in the draft
  Scaling scaling;
  Partial row; // the sums of the draft logits
};

// In every lane.
template <typename T, bool FILTERED>
METAL_FUNC Drafted read_drafted(
    VerifyInputs<T, FILTERED> in,
    constant VerifyDraftParams& params,
    int b,
    int i,
    int length,
    uint lane) {
  int row = params.batch * (params.drafts + 1) + b * params.drafts + i;
  bool has_draft = params.has_draft_logits != 0 && i < length;
  Partials partials = read_partials(
      in.partials + long(row) * params.chunks,
      has_draft ? params.chunks : 0,
      lane);
  Scaling greedy = make_scaling(INFINITY, -INFINITY, false);
  Drafted x = {0, 0.0f, 0.0f, 0.0f, greedy, empty_partial()};
  if (i < length) {
    x.token = draft_token(in.draft_tokens, params, b, i);
    x.u = in.uniforms[long(b) * params.uniforms_stride + i];
    x.z = in.drafted[b * (params.drafts + 1) + i];
  }
  if (has_draft) {
    x.y = in.drafted[row];
    x.scaling =
        draft_scaling(in.draft_stats, in.draft_temperature, params, b, i);
  }
  x.row = combine(partials, x.scaling.inv_t, lane);
  return x;
}

// What happens in row i if all drafts before it were accepted.
METAL_FUNC Decision judge(
    constant VerifyDraftParams& params,
    int i,
    int length,
    Density target,
    Drafted x) {
  Decision d = unusable_decision();
  d.target = target;
  if (d.target.usable == 0) {
    return d;
  }
  if (i == length) {
    d.row = i;
    d.bonus = 1;
    return d;
  }
  if (x.token < 0 || x.token >= params.vocab) {
    return d;
  }
  float p = probability(d.target, x.token, x.z);
  bool accepted = p > 0.0f;
  if (d.target.point < 0) {
    bool has_stats = params.has_draft_stats != 0;
    d.draft = make_draft_density(x.row, x.scaling, has_stats, x.token);
    float q = 1.0f;
    if (d.draft.usable != 0 && d.draft.point < 0) {
      // A probability may be too small for a float: what was kept counts.
      bool usable = is_kept(d.draft, x.y) && !is_unusable(x.y);
      d.draft.usable = usable ? 1 : 0;
      q = probability(d.draft, x.token, x.y);
    }
    if (d.draft.usable == 0) {
      return d;
    }
    accepted = x.u * metal::min(q, 1.0f) < p;
    if (!accepted && d.draft.flawed != 0) {
      return d;
    }
  }
  d.row = i;
  d.accepted = accepted ? 1 : 0;
  d.z = x.z;
  return d;
}

// Without filters: where sequence b stops, in every thread. Each simdgroup
// judges one row at a time. With `write_logprobs`, those of the accepted drafts
// are written.
template <typename T>
METAL_FUNC Decision decide(
    VerifyInputs<T, false> in,
    constant VerifyDraftParams& params,
    int b,
    bool write_logprobs,
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
      Partials target = read_partials(
          in.partials + (long(b) * (params.drafts + 1) + i) * params.chunks,
          params.chunks,
          team.lane);
      Drafted drafted = read_drafted(in, params, b, i, length, team.lane);
      float inv_t =
          inverse_temperature(in.temperature[b * params.temperature_stride]);
      Partial whole = combine(target, finite_inverse(inv_t), team.lane);
      Density density = make_density(whole, inv_t, -INFINITY);
      Decision mine = judge(params, i, length, density, drafted);
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
    if (write_logprobs && mine < stop) {
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

// The densities of the target, or if JUDGED the decisions about all rows.
template <typename T, bool JUDGED>
kernel void verify_draft_threshold(
    const device T* target_logits [[buffer(0)]],
    const device int* draft_tokens [[buffer(2)]],
    const device float* uniforms [[buffer(3)]],
    const device float* temperature [[buffer(4)]],
    const device float* top_k [[buffer(5)]],
    const device float* top_p [[buffer(6)]],
    const device float* min_p [[buffer(7)]],
    const device float* draft_temperature [[buffer(8)]],
    const device float* draft_stats [[buffer(9)]],
    const device int* draft_lengths [[buffer(10)]],
    const device uint* allowed [[buffer(11)]],
    const device Partial* partials [[buffer(12)]],
    const device float* maxima [[buffer(13)]],
    device Density* densities [[buffer(14)]],
    device ulong* few [[buffer(15)]],
    device Decision* decisions [[buffer(16)]],
    const device float* drafted [[buffer(17)]],
    constant VerifyDraftParams& params [[buffer(21)]],
    uint r [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  TG_ARRAY(atomic_uint, histogram, 2 * BINS);
  TG_ARRAY(ulong, sums, 32);
  TG_ARRAY(int, ids, FEW);
  TG_ARRAY(float, candidates, FEW);
  TG_ARRAY(ulong, weights, FEW);
  TG_ARRAY(atomic_uint, shared, 8);
  TG_ARRAY(Drafted, kept, 1);
  Team team = make_team(thread_index, threads);
  int b = int(r) / (params.drafts + 1);
  int i = int(r) % (params.drafts + 1);
  int length = draft_length(draft_lengths, params, b);
  if (i > length) {
    return;
  }
  length = metal::min(length, params.drafts);
  Sampling sampling = {
      temperature[b * params.temperature_stride],
      top_k[b * params.top_k_stride],
      top_p[b * params.top_p_stride],
      min_p[b * params.min_p_stride],
      params.temperature_first != 0};
  // One lane keeps what it will judge by, read while the others go on.
  bool judges = team.simdgroup + 1 == team.simdgroups;
  if (JUDGED && judges) {
    VerifyInputs<T, true> in = {
        target_logits,
        target_logits,
        draft_tokens,
        uniforms,
        temperature,
        draft_temperature,
        draft_stats,
        draft_lengths,
        allowed,
        partials,
        maxima,
        drafted};
    Drafted x = read_drafted(in, params, b, i, length, team.lane);
    if (team.lane == 0) {
      kept[0] = x;
    }
  }
  Partial whole = combine(
      read_partials(
          partials + long(r) * params.chunks, params.chunks, team.lane),
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
  if (!JUDGED && team.thread_index == 0) {
    densities[r] = d;
  }
  if (JUDGED && judges && team.lane == 0) {
    decisions[r] = judge(params, i, length, d, kept[0]);
  }
}

template <typename T, bool FILTERED>
METAL_FUNC Weights<T, FILTERED> weights_of(
    VerifyInputs<T, FILTERED> in,
    constant VerifyDraftParams& params,
    int b,
    Decision d) {
  int row = metal::max(d.row, 0);
  int draft_index = metal::min(row, metal::max(params.drafts - 1, 0));
  return Weights<T, FILTERED>{
      target_row(in.target_logits, in.allowed, params, b, row),
      draft_row(in.draft_logits, in.allowed, params, b, draft_index),
      d.target,
      d.draft,
      d.bonus == 0,
      in.maxima + (long(b) * (params.drafts + 1) + row) * params.groups};
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
    device ulong* sums [[buffer(15)]],
    device Decision* decisions [[buffer(16)]],
    const device float* drafted [[buffer(17)]],
    device float* logprobs [[buffer(20)]],
    constant VerifyDraftParams& params [[buffer(21)]],
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
      drafted};
  bool first = position.y == 0;
  bool write_logprobs = first && params.has_logprobs != 0;
  Decision d = decide(in, params, b, write_logprobs, logprobs, rows, team);
  if (first && team.thread_index == 0) {
    decisions[b] = d;
  }
  bool spread = d.row >= 0 && d.target.point < 0;
  Weights<T, false> x = weights_of(in, params, b, d);
  int part = int(position.y * team.simdgroups + team.simdgroup);
  int begin = part * params.part;
  int end = metal::min(begin + params.part, params.groups);
  sums += long(b) * params.groups;
#pragma unroll 2
  for (int group = begin; group < end; ++group) {
    ulong sum = 0;
    if (spread) {
      sum = simd_total(weights8(x, group * GROUP + int(team.lane) * 8).sum);
    }
    if (team.lane == 0) {
      sums[group] = sum;
    }
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

// With filters: where a sequence stops, from the decisions about its rows. In
// every lane.
METAL_FUNC Decision find_stop(
    const device Decision* rows,
    int length,
    constant VerifyDraftParams& params,
    uint lane) {
  int end = length > params.drafts ? -1 : length;
  for (int first = 0; first <= end; first += 32) {
    int i = first + int(lane);
    uint stops = lanes_where(i <= end && rows[i].accepted == 0);
    if (stops != 0) {
      return rows[first + int(metal::ctz(stops))];
    }
  }
  return unusable_decision();
}

// The token drawn where the sequence stops, below 0 if unusable, in one
// simdgroup; ELSEWHERE in the others. `words` has the candidates of every row.
template <typename T, bool FILTERED>
METAL_FUNC int draw_token(
    VerifyInputs<T, FILTERED> in,
    constant VerifyDraftParams& params,
    int b,
    Decision d,
    const device ulong* words,
    Pick group,
    ulong u,
    DrawSpace space,
    Team team) {
  if (group.lane == ELSEWHERE) {
    return ELSEWHERE;
  }
  Weights<T, FILTERED> x = weights_of(in, params, b, d);
  if (group.lane >= 0) {
    int id = group.lane * GROUP + int(team.lane) * 8;
    return find_in_group(weights8(x, id), id, group.rest, team.lane);
  }
  int token = d.row < 0 ? -1 : d.target.point;
  bool spread = d.row >= 0 && d.target.point < 0;
  bool known = spread && (!FILTERED || d.target.few >= 0);
  if (FILTERED && known) {
    words += (long(b) * (params.drafts + 1) + d.row) * FEW;
    token = draw_candidates(x, words, d.target.few, u, space, team);
  }
#pragma unroll 1
  for (int i = known ? 1 : 0; i < 2 && spread && token < 0; ++i) {
    // At last without q: where nothing is left of p it is q up to rounding.
    x.residual = x.residual && i == 0;
    token = draw_row(x, u, space.sums, space.result, team);
  }
  return team.simdgroup == 0 ? token : ELSEWHERE;
}

// By one simdgroup. Without filters decide() has written the log-probabilities
// of the accepted drafts.
template <typename T, bool FILTERED>
METAL_FUNC void write_results(
    VerifyInputs<T, FILTERED> in,
    constant VerifyDraftParams& params,
    int b,
    Decision d,
    const device Decision* rows,
    int token,
    device int* tokens,
    device int* accepted,
    device float* logprobs,
    uint lane) {
  int size = params.drafts + 1;
  int row = token < 0 ? -1 : d.row;
  for (int i = int(lane); i < size; i += 32) {
    long at = long(b) * size + i;
    if (i < row) {
      tokens[at] = draft_token(in.draft_tokens, params, b, i);
    } else {
      tokens[at] = i == row ? token : -1;
    }
    if (params.has_logprobs == 0) {
      continue;
    }
    if (i >= row) {
      Row<T> logits = target_row(in.target_logits, in.allowed, params, b, i);
      logprobs[at] =
          i == row ? log_softmax(d.target, load1(logits, token)) : 0.0f;
    } else if (FILTERED) {
      logprobs[at] = log_softmax(rows[i].target, rows[i].z);
    }
  }
  if (lane == 0) {
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
    const device ulong* words [[buffer(15)]],
    const device Decision* decisions [[buffer(16)]],
    const device float* drafted [[buffer(17)]],
    device int* tokens [[buffer(18)]],
    device int* accepted [[buffer(19)]],
    device float* logprobs [[buffer(20)]],
    constant VerifyDraftParams& params [[buffer(21)]],
    uint position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  TG_ARRAY(ulong, sums, 32);
  TG_ARRAY(int, result, 1);
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
      drafted};
  const device float* pair =
      uniforms + long(b) * params.uniforms_stride + params.drafts;
  ulong u = fine_uniform(pair[0], pair[1]);
  Decision d;
  Pick group = {NOWHERE, 0ul};
  if (FILTERED) {
    decisions += b * (params.drafts + 1);
    int length = draft_length(draft_lengths, params, b);
    d = find_stop(decisions, length, params, team.lane);
  } else {
    d = decisions[b];
    const device ulong* weights_of_groups = words + long(b) * params.groups;
    group = pick_group(weights_of_groups, params.groups, u, sums, team);
  }
  DrawSpace space = {sums, result, ids, z, weights};
  int token = draw_token(in, params, b, d, words, group, u, space, team);
  if (token != ELSEWHERE) {
    write_results(
        in,
        params,
        b,
        d,
        decisions,
        token,
        tokens,
        accepted,
        logprobs,
        team.lane);
  }
}
