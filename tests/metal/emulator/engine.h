// An emulator of Metal's execution model on one CPU thread. Every emulated
// thread is a fiber; 32 of them are a simdgroup. Kernels are compiled as C++
// against run/metal_stdlib and register themselves by name.
#pragma once

#include <cstddef>
#include <cstdint>

// Runs a kernel. Returns nullptr, or a message that says what the kernel did
// that is not allowed (valid until the next call).
//   grid     threadgroups in x, y, z
//   threads  threads of a threadgroup in x, y, z
//   buffers  the argument of [[buffer(n)]] at index n, constants too; may have
//   holes seed     0 runs threads in order, other values in a random order that
//   it fixes
extern "C" const char* emulator_launch(
    const char* kernel,
    const uint32_t grid[3],
    const uint32_t threads[3],
    void* const* buffers,
    int count,
    uint64_t seed);

// Bytes of threadgroup memory that the last kernel declared.
extern "C" size_t emulator_threadgroup_bytes();

// The names of all kernels, ended by a nullptr.
extern "C" const char* const* emulator_kernels();

namespace emulator {

struct U3 {
  uint32_t x, y, z;
};

struct Context {
  U3 position_in_grid, position_in_group, group, group_size, groups, grid_size;
  uint32_t lane, simdgroup, index, simdgroups;
};

extern Context* current;

using Kernel = void (*)();

struct Register {
  Register(const char* name, Kernel kernel);
};

void* buffer(size_t index);
void* threadgroup_memory(size_t bytes, size_t align);
void threadgroup_barrier(int line);
void simdgroup_barrier(int line);
[[noreturn]] void fail(const char* message, int line);

// The values of 32 lanes, 16 bytes each. All lanes that have not returned hand
// in `bytes` bytes; the last one to arrive runs `combine` over the slots.
struct Slots {
  unsigned char* data;
  uint32_t active;
};
using Combine = void (*)(unsigned char* slots, uint32_t active);
Slots exchange(const void* value, size_t bytes, Combine combine, int line);

} // namespace emulator
