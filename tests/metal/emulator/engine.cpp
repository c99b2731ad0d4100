#include "engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

// In sanitizer builds this file is the one that is not instrumented: only the
// accesses of the kernels count.
#ifdef WITH_ASAN
#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef WITH_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace emulator {

Context* current;

namespace {

constexpr uint32_t max_threads = 1024;
constexpr size_t max_threadgroup_memory = 32768;
constexpr size_t stack_size = 64 * 1024;

// Tells the thread sanitizer what orders two fibers. Everything else between
// them is a race, though they share one CPU thread.
void release(void* address) {
#ifdef WITH_TSAN
  __tsan_release(address);
#endif
}

void acquire(void* address) {
#ifdef WITH_TSAN
  __tsan_acquire(address);
#endif
}

struct Fiber {
  Context context;
  void* stack_pointer;
  char* stack;
  uint32_t declarations;
  void* tsan;
  void* fake_stack;
};

// Sets of lanes are bit masks.
struct Simdgroup {
  alignas(16) unsigned char slots[2][32][16];
  uint32_t all, runnable, in_simd, in_barrier, done;
  uint32_t active[2];
  int epoch;
  int line;
  Combine combine;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  uint32_t threads, arrived, done;
  int barrier_line;
  int running;
  Kernel kernel;
  void* const* buffers;
  int buffer_count;
  std::vector<std::pair<void*, size_t>> memory, used;
  size_t memory_bytes;
  bool shuffle;
  std::minstd_rand random;
  std::string error;
  void* main_stack_pointer;
  void* main_tsan;
  void* main_fake_stack;
  const void* main_stack;
  size_t main_stack_size;
  char started, ended, barrier, declared;
};

Machine machine;

std::map<std::string, Kernel>& registry() {
  static std::map<std::string, Kernel> kernels;
  return kernels;
}

// Saves the callee-saved registers of the System V ABI and the stack pointer.
#ifndef __x86_64__
#error "The emulator switches fibers on x86-64 only."
#endif
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");

// -1 is the caller of the launch.
constexpr int MAIN = -1;

Fiber* fiber(int i) {
  return i == MAIN ? nullptr : &machine.fibers[i];
}

void before_switch(Fiber* from, Fiber* to) {
#ifdef WITH_ASAN
  __sanitizer_start_switch_fiber(
      from ? &from->fake_stack : &machine.main_fake_stack,
      to ? to->stack : machine.main_stack,
      to ? stack_size : machine.main_stack_size);
#endif
#ifdef WITH_TSAN
  __tsan_switch_to_fiber(
      to ? to->tsan : machine.main_tsan, __tsan_switch_to_fiber_no_sync);
#endif
}

void after_switch(Fiber* to) {
#ifdef WITH_ASAN
  __sanitizer_finish_switch_fiber(
      to ? to->fake_stack : machine.main_fake_stack, nullptr, nullptr);
#endif
}

void switch_to(int target) {
  int self = machine.running;
  Fiber* from = fiber(self);
  Fiber* to = fiber(target);
  machine.running = target;
  current = to ? &to->context : nullptr;
  before_switch(from, to);
  emulator_switch(
      from ? &from->stack_pointer : &machine.main_stack_pointer,
      to ? to->stack_pointer : machine.main_stack_pointer);
  after_switch(from);
}

int nth_bit(uint32_t mask, int n) {
  while (n-- > 0) {
    mask &= mask - 1;
  }
  return __builtin_ctz(mask);
}

// A fiber that can run: the simdgroup's own next lane first, or any at random.
int next_fiber(uint32_t simdgroup) {
  uint32_t count = machine.simdgroups.size();
  uint32_t first = machine.shuffle ? machine.random() % count : simdgroup;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t s = (first + i) % count;
    if (uint32_t mask = machine.simdgroups[s].runnable) {
      int n = machine.shuffle ? machine.random() % __builtin_popcount(mask) : 0;
      return s * 32 + nth_bit(mask, n);
    }
  }
  return MAIN;
}

void wait(int line) {
  int next = next_fiber(current->simdgroup);
  if (next == MAIN) {
    fail(
        "only a part of the threads reached a barrier or simd operation", line);
  }
  if (next != machine.running) {
    switch_to(next);
  }
}

void complete(Simdgroup& s) {
  int e = s.epoch & 1;
  s.active[e] = s.in_simd;
  if (s.combine) {
    s.combine(&s.slots[e][0][0], s.in_simd);
  }
  s.runnable |= s.in_simd;
  s.in_simd = 0;
  ++s.epoch;
}

void run_fiber() {
  after_switch(fiber(machine.running));
  acquire(&machine.started);
  machine.kernel();
  release(&machine.ended);
  Simdgroup& s = machine.simdgroups[current->simdgroup];
  uint32_t bit = 1u << current->lane;
  s.runnable &= ~bit;
  s.done |= bit;
  ++machine.done;
  if (machine.arrived) {
    fail(
        "a thread returned while others wait at a barrier",
        machine.barrier_line);
  }
  if (s.in_simd && s.in_simd == (s.all & ~s.done)) {
    complete(s);
  }
  int next = next_fiber(current->simdgroup);
  if (next == MAIN && machine.done != machine.threads) {
    fail("threads wait for others that returned", 0);
  }
  switch_to(next);
  __builtin_trap();
}

char* map_stack() {
  return static_cast<char*>(mmap(
      nullptr,
      stack_size,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
      -1,
      0));
}

void reset_fiber(
    uint32_t i,
    const U3& group,
    const U3& groups,
    const U3& size) {
  Fiber& f = machine.fibers[i];
  Context& c = f.context;
  c.position_in_group = {
      i % size.x, i / size.x % size.y, i / (size.x * size.y)};
  c.group = group;
  c.groups = groups;
  c.group_size = size;
  c.position_in_grid = {
      group.x * size.x + c.position_in_group.x,
      group.y * size.y + c.position_in_group.y,
      group.z * size.z + c.position_in_group.z};
  c.grid_size = {groups.x * size.x, groups.y * size.y, groups.z * size.z};
  c.lane = i % 32;
  c.simdgroup = i / 32;
  c.index = i;
  c.simdgroups = machine.simdgroups.size();
  f.declarations = 0;
  f.fake_stack = nullptr;
#ifdef WITH_TSAN
  // Fresh memory: what the last threadgroup left on its stacks is no race.
  munmap(f.stack, stack_size);
  f.stack = map_stack();
#endif
  // run_fiber() starts as if it had been called: with a misaligned stack
  // pointer.
  auto top = reinterpret_cast<void**>(f.stack + stack_size) - 2;
  *top = reinterpret_cast<void*>(run_fiber);
  std::memset(top - 6, 0, 6 * sizeof(void*));
  f.stack_pointer = top - 6;
#ifdef WITH_TSAN
  f.tsan = __tsan_create_fiber(0);
#endif
}

void resize(uint32_t threads) {
  for (uint32_t i = machine.fibers.size(); i < threads; ++i) {
    Fiber f = {};
    f.stack = map_stack();
    machine.fibers.push_back(f);
  }
  machine.threads = threads;
  machine.simdgroups.resize((threads + 31) / 32);
  for (auto& s : machine.simdgroups) {
    uint32_t left = threads - 32 * (&s - machine.simdgroups.data());
    s.all = left >= 32 ? ~0u : (1u << left) - 1;
    s.runnable = s.all;
    s.in_simd = s.in_barrier = s.done = 0;
    s.epoch = 0;
  }
}

void run_group(const U3& group, const U3& groups, const U3& size) {
  resize(size.x * size.y * size.z);
  machine.arrived = machine.done = 0;
  machine.memory_bytes = 0;
  for (uint32_t i = 0; i < machine.threads; ++i) {
    reset_fiber(i, group, groups, size);
  }
  switch_to(next_fiber(0));
#ifdef WITH_TSAN
  for (uint32_t i = 0; i < machine.threads; ++i) {
    __tsan_destroy_fiber(machine.fibers[i].tsan);
  }
#endif
  machine.used.insert(
      machine.used.end(), machine.memory.begin(), machine.memory.end());
  machine.memory.clear();
}

// Threadgroup memory is kept until here, so that the thread sanitizer does not
// take the order of the threadgroups on this thread for one that Metal has.
void finish() {
  acquire(&machine.ended);
  for (auto& m : machine.used) {
    std::free(m.first);
  }
  machine.used.clear();
}

void remember_main() {
  machine.running = MAIN;
#ifdef WITH_TSAN
  machine.main_tsan = __tsan_get_current_fiber();
#endif
#ifdef WITH_ASAN
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  void* bottom;
  pthread_attr_getstack(&attributes, &bottom, &machine.main_stack_size);
  machine.main_stack = bottom;
  pthread_attr_destroy(&attributes);
#endif
}

// No library call: the sanitizers would see the accesses of the emulator
// itself.
void copy(unsigned char* to, const unsigned char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    to[i] = from[i];
    asm volatile("" ::: "memory");
  }
}

} // namespace

Register::Register(const char* name, Kernel kernel) {
  registry()[name] = kernel;
}

void fail(const char* message, int line) {
  machine.error = message;
  if (line) {
    machine.error += " (line " + std::to_string(line) + ")";
  }
  // The other fibers are left where they are: kernels own nothing.
  release(&machine.ended);
  switch_to(MAIN);
  __builtin_trap();
}

void* buffer(size_t index) {
  bool bound = index < static_cast<size_t>(machine.buffer_count) &&
      machine.buffers[index];
  if (!bound) {
    std::string message = "buffer " + std::to_string(index) + " is not bound";
    fail(message.c_str(), 0);
  }
  return machine.buffers[index];
}

void* threadgroup_memory(size_t bytes, size_t align) {
  uint32_t k = machine.fibers[machine.running].declarations++;
  if (k < machine.memory.size()) {
    if (machine.memory[k].second != bytes) {
      fail("threads declare different threadgroup memory", 0);
    }
    acquire(&machine.declared);
    return machine.memory[k].first;
  }
  machine.memory_bytes += (bytes + 15) & ~size_t(15);
  if (machine.memory_bytes > max_threadgroup_memory) {
    fail("more than 32768 bytes of threadgroup memory", 0);
  }
  void* p = nullptr;
  if (posix_memalign(&p, align < 16 ? 16 : align, bytes)) {
    std::abort();
  }
  // NaN or a large integer, so that reads before a write show.
  static const unsigned char poison[4] = {0xff, 0xff, 0xff, 0x7f};
  for (size_t i = 0; i < bytes; ++i) {
    copy(static_cast<unsigned char*>(p) + i, &poison[i % 4], 1);
  }
  machine.memory.push_back({p, bytes});
  release(&machine.declared);
  return p;
}

void threadgroup_barrier(int line) {
  Simdgroup& s = machine.simdgroups[current->simdgroup];
  uint32_t bit = 1u << current->lane;
  if (machine.done) {
    fail("a barrier after some threads returned", line);
  }
  if (machine.arrived && machine.barrier_line != line) {
    fail("threads are at different barriers", line);
  }
  if (s.in_simd) {
    fail("a barrier while other lanes wait in a simd operation", line);
  }
  machine.barrier_line = line;
  release(&machine.barrier);
  s.runnable &= ~bit;
  s.in_barrier |= bit;
  if (++machine.arrived == machine.threads) {
    for (auto& each : machine.simdgroups) {
      each.runnable |= each.in_barrier;
      each.in_barrier = 0;
    }
    machine.arrived = 0;
    if (machine.shuffle) {
      wait(line);
    }
  } else {
    wait(line);
  }
  acquire(&machine.barrier);
}

Slots exchange(const void* value, size_t bytes, Combine combine, int line) {
  Simdgroup& s = machine.simdgroups[current->simdgroup];
  int e = s.epoch & 1;
  uint32_t bit = 1u << current->lane;
  if (s.in_simd && (s.line != line || s.combine != combine)) {
    fail("lanes of one simdgroup are at different simd operations", line);
  }
  s.line = line;
  s.combine = combine;
  copy(
      s.slots[e][current->lane],
      static_cast<const unsigned char*>(value),
      bytes);
  s.in_simd |= bit;
  s.runnable &= ~bit;
  if (s.in_simd == (s.all & ~s.done)) {
    complete(s);
  } else {
    if (!s.runnable && s.in_barrier) {
      fail("a simd operation while other lanes wait at a barrier", line);
    }
    wait(line);
  }
  return {&s.slots[e][0][0], s.active[e]};
}

void simdgroup_barrier(int line) {
  Simdgroup* s = &machine.simdgroups[current->simdgroup];
  char none = 0;
  release(s);
  exchange(&none, 1, nullptr, line);
  acquire(s);
}

} // namespace emulator

using namespace emulator;

extern "C" size_t emulator_threadgroup_bytes() {
  return machine.memory_bytes;
}

extern "C" const char* const* emulator_kernels() {
  static std::vector<const char*> names;
  names.clear();
  for (auto& kernel : registry()) {
    names.push_back(kernel.first.c_str());
  }
  names.push_back(nullptr);
  return names.data();
}

static const char* refuse(const std::string& message) {
  machine.error = message;
  return machine.error.c_str();
}

extern "C" const char* emulator_launch(
    const char* kernel,
    const uint32_t grid[3],
    const uint32_t threads[3],
    void* const* buffers,
    int count,
    uint64_t seed) {
  auto found = registry().find(kernel);
  if (found == registry().end()) {
    return refuse(std::string("no kernel ") + kernel);
  }
  uint64_t size = uint64_t(threads[0]) * threads[1] * threads[2];
  uint64_t groups = uint64_t(grid[0]) * grid[1] * grid[2];
  if (size == 0 || size > max_threads || groups == 0) {
    return refuse(
        "a threadgroup has 1 to 1024 threads and a grid is not empty");
  }
  machine.kernel = found->second;
  machine.buffers = buffers;
  machine.buffer_count = count;
  machine.shuffle = seed != 0;
  machine.random.seed(seed);
  machine.error.clear();
  remember_main();
  std::vector<uint32_t> order(groups);
  std::iota(order.begin(), order.end(), 0);
  if (machine.shuffle) {
    std::shuffle(order.begin(), order.end(), machine.random);
  }
  release(&machine.started);
  for (uint32_t i : order) {
    U3 group = {i % grid[0], i / grid[0] % grid[1], i / (grid[0] * grid[1])};
    run_group(
        group,
        {grid[0], grid[1], grid[2]},
        {threads[0], threads[1], threads[2]});
    if (!machine.error.empty()) {
      break;
    }
  }
  finish();
  return machine.error.empty() ? nullptr : machine.error.c_str();
}
