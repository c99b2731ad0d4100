// Loops over independent rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <future>
#include <thread>
#include <vector>

#include "mlx/threadpool.h"

namespace mlx_mtp::cpu {

// The workers of all streams; MLX gives a stream one thread of its own. Never
// destroyed: a stream may still run at exit.
inline ThreadPool& workers() {
  static auto* pool =
      new ThreadPool(std::max(1u, std::thread::hardware_concurrency()) - 1);
  return *pool;
}

// Calls make() on each thread that takes part, and what it returns with each i
// of [0, n). `work` is the number of elements to read in all: below what pays
// for waking a thread the loop stays on this one.
template <typename Make>
void parallel_for(int64_t n, int64_t work, Make make) {
  constexpr int64_t work_per_thread = 1 << 17;
  int64_t threads = std::min<int64_t>(
      {n, work / work_per_thread, std::thread::hardware_concurrency()});
  std::atomic<int64_t> next = 0;
  auto run = [&] {
    auto f = make();
    for (int64_t i = next++; i < n; i = next++) {
      f(i);
    }
  };
  std::vector<std::future<void>> others;
  for (int64_t t = 1; t < threads; ++t) {
    others.push_back(workers().enqueue(run));
  }
  run();
  for (auto& other : others) {
    other.wait();
  }
}

} // namespace mlx_mtp::cpu
