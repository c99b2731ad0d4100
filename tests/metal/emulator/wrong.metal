// Kernels that do what Metal forbids, and a few that look like it but do not.
#include <metal_stdlib>

using namespace metal;

#define ARGUMENTS                                     \
  device float *a [[buffer(0)]],                      \
      uint i [[thread_position_in_threadgroup]],      \
      uint lane [[thread_index_in_simdgroup]],        \
      uint group [[threadgroup_position_in_grid]]

#define wrong(name, ...)                  \
  template <typename T>                   \
  kernel void name(ARGUMENTS) {           \
    __VA_ARGS__                           \
    a[i] += 0.0f * T(lane + group);       \
  }                                       \
  instantiate_kernel(#name, name, float)

#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup);

// Written out: operations are told apart by their line.
template <typename T>
kernel void two_barriers(ARGUMENTS) {
  if (i < 32) {
    BARRIER
  } else {
    BARRIER
  }
  a[i] = T(lane + group);
}
instantiate_kernel("two_barriers", two_barriers, float)

wrong(divergent_barrier, if (i < 40) { BARRIER })
wrong(early_return, if (i == 5) { return; } BARRIER)
wrong(late_barrier, if (i < 32) { return; } BARRIER)
wrong(partial_simd, if (lane < 7) { a[i] = simd_sum(1.0f); } BARRIER)
wrong(
    divergent_simd,
    if (lane < 7) { a[i] = simd_sum(1.0f); }
    else { a[i] = simd_max(1.0f); })
wrong(
    shuffle_from_left_lane,
    if (lane >= 16) { return; } a[i] = simd_shuffle(1.0f, ushort(20));)
wrong(too_much_memory, TG_ARRAY(float, t, 8200); t[i] = 1.0f;)
wrong(unbound_buffer, )

wrong(
    reads_nothing,
    TG_ARRAY(float, t, 64);
    if (i < 10) { t[i] = 1.0f; } BARRIER a[i] = t[i];)
wrong(out_of_bounds, TG_ARRAY(float, t, 63); t[i] = 1.0f; BARRIER a[i] = 1.0f;)
wrong(
    missing_barrier,
    TG_ARRAY(float, t, 64);
    t[i] = 1.0f; a[i] = t[63 - i];)
wrong(
    simd_is_no_barrier,
    TG_ARRAY(float, t, 64);
    t[i] = 1.0f; float s = simd_sum(1.0f); a[i] = s + t[i ^ 1];)
wrong(device_race, a[i & 1] = float(i);)
wrong(race_between_groups, if (i == 0) { a[0] += 1.0f; })
wrong(bad_conversion, a[i] = float(uint(a[i] - 1.0e20f));)

wrong(
    right_simd_barrier,
    TG_ARRAY(float, t, 64);
    t[i] = float(i);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    a[i] = t[i ^ 1];)
wrong(
    right_barrier,
    TG_ARRAY(float, t, 64);
    t[i] = float(i); BARRIER a[i] = t[63 - i];)
wrong(
    right_partial_exit,
    if (lane >= 16) { return; } a[i] = simd_sum(1.0f);)
