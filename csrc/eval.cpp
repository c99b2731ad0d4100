#include "eval.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "mlx/transforms.h"

namespace mlx_mtp {

namespace {

bool runs_on_gpu(const mx::array& x) {
  return x.event().valid() && x.event().stream().device == mx::Device::gpu;
}

} // namespace

void eval(std::vector<mx::array> arrays, int spin_us) {
  using Clock = std::chrono::steady_clock;
  if (spin_us < 0) {
    throw std::invalid_argument(
        "[eval] spin_us must be at least 0 but is " + std::to_string(spin_us) +
        ".");
  }
  mx::async_eval(arrays);
  auto end = Clock::now() + std::chrono::microseconds(spin_us);
  for (auto& x : arrays) {
    while (runs_on_gpu(x) && !x.is_available() && Clock::now() < end) {
    }
  }
  mx::eval(std::move(arrays));
}

} // namespace mlx_mtp
