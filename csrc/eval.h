#pragma once

#include <vector>

#include "mlx/array.h"

namespace mlx_mtp {

namespace mx = mlx::core;

// Evaluates arrays. A thread that waits for a GPU looks for the results for so
// many microseconds before it sleeps: to wake it takes MLX about 30.
void eval(std::vector<mx::array> arrays, int spin_us);

} // namespace mlx_mtp
