// Loops over independent rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "mlx/threadpool.h"

namespace mlx_mtp::cpu {

// The workers of all streams; MLX gives a stream one thread of its own. Never
// destroyed: a stream may still run at exit.
inline ThreadPool& workers() {
  static auto* pool =
      new ThreadPool(std::max(1u, std::thread::hardware_concurrency()) - 1);
  return *pool;
}

// Each thread that takes part calls make() once, and what it returns with every
// i of [0, n) that it takes. `work` is the number of elements to read in all:
// little work stays on this thread. What throws ends the program, as it does in
// threads of MLX.
template <typename Make>
void parallel_for(int64_t n, int64_t work, const Make& make) {
  constexpr int64_t work_per_thread = 1 << 17;
  struct Progress {
    std::atomic<int64_t> next = 0;
    std::atomic<int64_t> done = 0;
  };
  auto progress = std::make_shared<Progress>();
  // A worker that starts after all are taken uses nothing but `progress`: this
  // thread does not wait for it.
  auto run = [progress, n, &make]() noexcept {
    int64_t i = progress->next++;
    if (i >= n) {
      return;
    }
    auto f = make();
    for (; i < n; i = progress->next++) {
      f(i);
      if (++progress->done == n) {
        progress->done.notify_one();
      }
    }
  };
  int64_t threads = std::min<int64_t>(
      {n, work / work_per_thread, std::thread::hardware_concurrency()});
  for (int64_t t = 1; t < threads; ++t) {
    workers().enqueue(run);
  }
  run();
  for (int64_t done; (done = progress->done) < n;) {
    progress->done.wait(done);
  }
}

} // namespace mlx_mtp::cpu
