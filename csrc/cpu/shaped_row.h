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

// 1 / temperature, infinity for a greedy one: also for a denormal temperature,
// whose inverse overflows, and for -0.
inline float inverse(float temperature) {
  return 1 / (temperature + 0.0f);
}

// Keeps O(V / max_block) of scratch, reused from row to row.
class ShapedRow {
 public:
  // Returns false for a row that nothing can be drawn from: NaN, +inf, or no
  // finite logit at all.
  bool shape(const Row& row, const RowParams& params);

  // The same with a threshold that is already known.
  bool shape(const Row& row, float inv_t, float threshold);

  const Density& density() const {
    return density_;
  }

  // log-sum-exp over the survivors in units of z / temperature, 0 for a point
  double log_sum() const;

  // log-softmax of one logit before temperature and filters
  double log_softmax(float z);

  // The id that is first in a race of the tokens, each with its noise over its
  // weight as its time: the argmax of z / temperature - log(noise).
  int race(const Noise& noise) const;

  // The id at the quantile u of the distribution, in id order.
  int draw(double u);

  // The same for max(p - q, 0), or for p if that is empty. -1 when the row of q
  // holds NaN or +inf. q_row is not read when q is a point.
  int draw_residual(const Row* q_row, const Density& q, double u);

 private:
  bool read(const Row& row);
  bool shape(float inv_t, float threshold);
  int argmax() const;
  float threshold(const RowParams& params, float inv_t);
  float top_k_threshold(int k);
  void gather(float bound);
  float
  top_p_threshold(const Density& base, double mass, float top_k_threshold);
  float select(double mass, float lower, const Density* base) const;
  void fill_histogram(
      float lower,
      const Density* base,
      uint32_t prefix,
      int shift,
      int bits,
      std::vector<double>& histogram) const;
  double sum(const Density& p, double* sums) const;
  double full_sum();
  double residual(int block, const Row* q_row, const Density& q, float* out)
      const;
  template <typename Fill>
  int pick(double u, Fill fill) const;

  Row row_;
  float max_;
  double full_sum_; // of exp(z - max), 0 until asked for
  Density density_;
  std::vector<float> maxima_; // of each block
  std::vector<double> sums_; // of each block's weights
  std::vector<float> top_; // logits above the top-k threshold
  bool has_top_; // whether top_ holds all of them
};

} // namespace mlx_mtp::cpu
