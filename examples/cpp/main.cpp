// The ops from C++: one verification of three drafts, then the accepted rows go
// to a cache whose write position never leaves the device.
#include <iostream>

#include "mlx/mlx.h"
#include "mlx_mtp/ops.h"

namespace mx = mlx::core;

int main() {
  const int B = 1, K = 3, V = 8, H = 2, S = 16, D = 4;

  // A target that wants 3, 1, 4, 1 and drafts that have the first two right.
  auto wanted = mx::array({3, 1, 4, 1}, {B, K + 1});
  auto logits = 10.0f *
      mx::astype(mx::equal(mx::expand_dims(wanted, -1), mx::arange(V)),
                 mx::float32);
  auto drafts = mx::array({3, 1, 5}, {B, K});

  mlx_mtp::SamplingParams greedy{.temperature = 0.0f};
  auto [tokens, accepted, logprobs] = mlx_mtp::verify_draft(
      logits,
      drafts,
      std::nullopt, // drafts without logits count as point masses
      mx::random::uniform({B, K + 2}),
      std::nullopt,
      greedy);

  auto cache = mx::zeros({B, H, S, D});
  auto rows = mx::ones({B, H, K + 1, D});
  auto start = mx::array({5}, {B});
  cache = mlx_mtp::commit_rows(cache, rows, start, accepted + mx::array(1));

  mx::eval(tokens, accepted, cache);
  std::cout << "tokens " << tokens << "\naccepted " << accepted << "\nrows "
            << mx::sum(mx::slice(cache, {0, 0, 0, 0}, {1, 1, S, 1})) << "\n";
}
