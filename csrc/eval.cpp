#include "eval.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "mlx/primitives.h"
#include "mlx/transforms.h"

namespace mlx_mtp {

namespace {

using Clock = std::chrono::steady_clock;

bool runs_on_gpu(const mx::array& x) {
  if (x.event().valid()) {
    return x.event().stream().device == mx::Device::gpu;
  }
  return x.has_primitive() && !x.is_tracer() &&
      x.primitive().device() == mx::Device::gpu;
}

void look_until(const mx::array& x, Clock::time_point end) {
  while (runs_on_gpu(x) && !x.is_available() && Clock::now() < end) {
  }
}

} // namespace

void eval(std::vector<mx::array> arrays, int spin_us) {
  if (spin_us < 0) {
    throw std::invalid_argument(
        "[eval] spin_us must be at least 0 but is " + std::to_string(spin_us) +
        ".");
  }
  if (std::any_of(arrays.begin(), arrays.end(), runs_on_gpu)) {
    mx::async_eval(arrays);
    auto end = Clock::now() + std::chrono::microseconds(spin_us);
    for (auto& x : arrays) {
      look_until(x, end);
    }
  }
  mx::eval(std::move(arrays));
}

} // namespace mlx_mtp
