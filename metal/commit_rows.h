// Writes the first count[b] staged rows of each sequence into a cache, one unit
// of a row a thread.
#pragma once

#include "params.h"
#include "prelude.h"

template <typename U>
kernel void commit_rows(
    device U* cache [[buffer(0)]],
    const device U* rows [[buffer(1)]],
    const device int* start [[buffer(2)]],
    const device int* count [[buffer(3)]],
    constant CommitRowsParams& params [[buffer(4)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  long index = long(position.x) * threads.x + thread_index;
  int h = int(position.y);
  int b = int(position.z);
  int slots = params.ring > 0 ? params.ring : params.slots;
  int n = metal::clamp(
      count[long(b) * params.count_stride], 0, metal::min(params.rows, slots));
  if (index >= long(n) * params.units) {
    return;
  }
  int i = int(index / params.units);
  int d = int(index % params.units);
  int first = start[long(b) * params.start_stride];
  if (params.ring > 0) {
    first %= slots;
    first += first < 0 ? slots : 0;
  } else {
    first = metal::clamp(first, 0, slots - n);
  }
  // The sum of two slots may not fit in 32 bits.
  int slot = i < slots - first ? first + i : i - (slots - first);
  long to = (long(b) * params.heads + h) * params.slots + slot;
  cache[to * params.units + d] = rows
      [long(b) * params.rows_strides[0] + long(h) * params.rows_strides[1] +
       long(i) * params.rows_strides[2] + d];
}
