// The shaped distribution of a row (see SamplingParams in ops.h) and its draws.
#pragma once

#include <vector>

#include "cpu/row.h"

namespace mlx_mtp::cpu {

// The sampling parameters of one row.
struct RowParams {
  float temperature;
  float top_k;
  float top_p;
  float min_p;
  bool temperature_first;

  bool valid() const;
};

// p(z) = scale * exp((z - ref) * inv_t) for z >= threshold, else 0; or all mass
// on one id. The reference keeps the exponent small whatever the temperature
// is.
struct Density {
  int point{-1};
  float ref{0};
  float inv_t{1};
  float threshold{-std::numeric_limits<float>::infinity()};
  double scale{1};

  double operator()(int id, float z) const;
};

class ShapedRow {
 public:
  // Returns false for a row that nothing can be drawn from: NaN, +inf, or no
  // finite logit at all.
  bool shape(const Row& row, const RowParams& params);

  const Density& density() const {
    return density_;
  }

  double probability(int id) const {
    return density_(id, (*row_)[id]);
  }

  // log-softmax of the row before temperature and filters
  double log_softmax(int id) const {
    return (*row_)[id] - log_sum_;
  }

  // log-sum-exp over the survivors in units of z / temperature
  double log_sum() const;

  // The id at the quantile u of the distribution, in id order.
  int draw(double u) const;

  // The same for max(p - q, 0), for p if that is empty. -1 when the row of q
  // has an unusable value.
  int draw_residual(const Row& q_row, const Density& q, double u) const;

 private:
  const Row* row_;
  Density density_;
  double log_sum_;
};

} // namespace mlx_mtp::cpu
