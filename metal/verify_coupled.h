// Verification by noise that belongs to positions and ids: token t of a
// sequence is the first in a race of the kept ids, each with its noise over its
// weight as its time. The first dispatches are those of verify_draft, without a
// draft. Then every threadgroup runs the race of one chunk, and one threadgroup
// a sequence takes the winners up to the first that is not the draft.
#pragma once

#include "noise.h"
#include "verify_draft.h"

METAL_FUNC Racer first_of(Racer a, Racer b) {
  bool second = b.time < a.time || (b.time == a.time && b.id < a.id);
  return second ? b : a;
}

METAL_FUNC Racer simd_first(Racer a) {
  float time = -simd_max(-a.time);
  return Racer{time, simd_min(a.time == time ? a.id : NO_ID)};
}

// With the ids of one group.
template <typename T>
METAL_FUNC Racer
race_group(Row<T> row, Density d, Words key, uint at, int id, Racer first) {
  Eight z = load8(row, id);
  for (int i = 0; i < 8; ++i) {
    if (is_kept(d, z.z[i])) {
      float noise = exponential(threefry(key, Words{at, uint(id + i)}));
      float time = noise * fast_exp((d.ref - z.z[i]) * d.inv_t);
      first = first_of(first, Racer{time, id + i});
    }
  }
  return first;
}

// The density of row i, in every lane.
template <bool FILTERED>
METAL_FUNC Density coupled_density(
    const device Partial* partials,
    const device Density* densities,
    const device float* temperature,
    constant VerifyDraftParams& params,
    int b,
    int i,
    uint lane) {
  if (FILTERED) {
    return densities[b * (params.drafts + 1) + i];
  }
  float inv_t = inverse_temperature(temperature[b * params.temperature_stride]);
  long r = long(b) * (params.drafts + 1) + i;
  Partial whole = combine(
      read_partials(partials + r * params.chunks, params.chunks, lane),
      finite_inverse(inv_t),
      lane);
  return make_density(whole, inv_t, -INFINITY);
}

template <typename T, bool FILTERED>
kernel void verify_coupled_race(
    const device T* target_logits [[buffer(0)]],
    const device uint* seed [[buffer(3)]],
    const device float* temperature [[buffer(4)]],
    const device int* positions [[buffer(8)]],
    const device int* draft_lengths [[buffer(10)]],
    const device uint* allowed [[buffer(11)]],
    const device Partial* partials [[buffer(12)]],
    const device float* maxima [[buffer(13)]],
    const device Density* densities [[buffer(14)]],
    device Racer* racers [[buffer(16)]],
    constant VerifyCoupledParams& params [[buffer(21)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  TG_ARRAY(Racer, scratch, 32);
  Team team = make_team(thread_index, threads.x);
  int r = int(position.x);
  int chunk = int(position.y);
  int rows = params.verify.drafts + 1;
  int b = r / rows;
  int i = r % rows;
  if (i > draft_length(draft_lengths, params.verify, b)) {
    return;
  }
  Density d = coupled_density<FILTERED>(
      partials, densities, temperature, params.verify, b, i, team.lane);
  Racer first = {INFINITY, NO_ID};
  if (d.usable != 0 && d.point < 0) {
    Row<T> row = target_row(target_logits, allowed, params.verify, b, i);
    const device uint* words = seed + long(b) * params.seed_stride;
    Words key = {words[0], words[1]};
    uint at = uint(positions[b * params.position_stride]) + uint(i);
    int begin = chunk * (params.verify.chunk / GROUP);
    int end =
        metal::min(begin + params.verify.chunk / GROUP, params.verify.groups);
    maxima += long(r) * params.verify.groups;
    for (int group = begin + int(team.simdgroup); group < end;
         group += int(team.simdgroups)) {
      if (!FILTERED || maxima[group] >= d.threshold) {
        int id = group * GROUP + int(team.lane) * 8;
        first = race_group(row, d, key, at, id, first);
      }
    }
  }
  first = simd_first(first);
  if (team.lane == 0) {
    scratch[team.simdgroup] = first;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (team.simdgroup == 0) {
    Racer each = {INFINITY, NO_ID};
    if (team.lane < team.simdgroups) {
      each = scratch[team.lane];
    }
    first = simd_first(each);
    if (team.lane == 0) {
      racers[long(r) * params.verify.chunks + chunk] = first;
    }
  }
}

// The token of a row, -1 if unusable. By one simdgroup, in every lane.
METAL_FUNC int
winner(Density d, const device Racer* racers, int chunks, uint lane) {
  if (d.usable == 0 || d.point >= 0) {
    return d.usable == 0 ? -1 : d.point;
  }
  Racer first = {INFINITY, NO_ID};
  for (int i = int(lane); i < chunks; i += 32) {
    first = first_of(first, racers[i]);
  }
  return simd_first(first).id;
}

template <typename T, bool FILTERED>
kernel void verify_coupled_finish(
    const device T* target_logits [[buffer(0)]],
    const device int* draft_tokens [[buffer(2)]],
    const device float* temperature [[buffer(4)]],
    const device int* draft_lengths [[buffer(10)]],
    const device uint* allowed [[buffer(11)]],
    const device Partial* partials [[buffer(12)]],
    const device Density* densities [[buffer(14)]],
    const device Racer* racers [[buffer(16)]],
    device int* tokens [[buffer(18)]],
    device int* accepted [[buffer(19)]],
    device float* logprobs [[buffer(20)]],
    constant VerifyCoupledParams& params [[buffer(21)]],
    uint position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  Team team = make_team(thread_index, threads);
  int b = int(position);
  int rows = params.verify.drafts + 1;
  int length = draft_length(draft_lengths, params.verify, b);
  length = length > params.verify.drafts ? -1 : length;
  tokens += long(b) * rows;
  logprobs += long(b) * rows;
  racers += long(b) * rows * params.verify.chunks;
  for (int i = int(team.simdgroup); i <= length; i += int(team.simdgroups)) {
    Density d = coupled_density<FILTERED>(
        partials, densities, temperature, params.verify, b, i, team.lane);
    const device Racer* of_row = racers + long(i) * params.verify.chunks;
    int token = winner(d, of_row, params.verify.chunks, team.lane);
    if (team.lane == 0) {
      tokens[i] = token;
      Row<T> row = target_row(target_logits, allowed, params.verify, b, i);
      logprobs[i] = log_softmax(d, load1(row, metal::max(token, 0)));
    }
  }
  threadgroup_barrier(mem_flags::mem_device);
  const device int* drafts =
      draft_tokens + long(b) * params.verify.tokens_strides[0];
  int row = 0;
  while (row < length && tokens[row] >= 0 &&
         tokens[row] == drafts[long(row) * params.verify.tokens_strides[1]]) {
    ++row;
  }
  row = length < 0 || tokens[row] < 0 ? -1 : row;
  threadgroup_barrier(mem_flags::mem_device);
  for (int i = int(team.thread_index); i < rows; i += int(team.threads)) {
    if (i > row) {
      tokens[i] = -1;
      logprobs[i] = 0.0f;
    }
  }
  if (team.thread_index == 0) {
    accepted[b] = row;
  }
}
