#include "cpu/shaped_row.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

namespace mlx_mtp::cpu {

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
// Sorted in less time than a histogram is cleared.
constexpr int small_row = 128;

} // namespace

bool RowParams::valid() const {
  return temperature >= 0 && temperature < inf && top_k >= 0 &&
      top_k == std::floor(top_k) && top_p > 0 && top_p <= 1 && min_p >= 0 &&
      min_p <= 1;
}

bool ShapedRow::shape(const Row& row, const RowParams& params) {
  float inv_t = inverse(params.temperature);
  if (inv_t < inf) {
    return read(row) && shape(inv_t, threshold(params, inv_t));
  }
  if (!read(row)) {
    return false;
  }
  density_ = {argmax(), max_, inv_t, max_, 1};
  return true;
}

bool ShapedRow::shape(const Row& row, float inv_t, float threshold) {
  return read(row) && shape(inv_t, threshold);
}

bool ShapedRow::shape(float inv_t, float threshold) {
  density_ = {-1, max_, inv_t, threshold, 1};
  double total = sum(density_, sums_.data());
  if (inv_t == 1 && threshold == -inf) {
    full_sum_ = total;
  }
  density_.scale = 1 / total;
  return total > 0;
}

double ShapedRow::log_sum() const {
  return density_.point < 0
      ? static_cast<double>(max_) * density_.inv_t - std::log(density_.scale)
      : 0;
}

double ShapedRow::log_softmax(float z) {
  return static_cast<double>(z) - max_ - std::log(full_sum());
}

int ShapedRow::draw(double u) {
  if (density_.point >= 0) {
    return density_.point;
  }
  return pick(u, [this](int block, float* out) {
    float buffer[max_block];
    auto* x = row_.read(block, buffer);
    weights(x, row_.length(block), density_, out);
  });
}

int ShapedRow::race(const Noise& noise) const {
  if (density_.point >= 0) {
    return density_.point;
  }
  float buffer[max_block];
  float w[max_block];
  float below[max_block];
  int first = -1;
  double best = inf;
  for (int b = 0; b < row_.blocks(); ++b) {
    if (maxima_[b] < density_.threshold) {
      continue;
    }
    int n = row_.length(b);
    auto* x = row_.read(b, buffer);
    weights(x, n, density_, w);
    below_noise(noise, b * row_.block(), n, below);
    for (int i = 0; i < n; ++i) {
      // Few pass: only they need the logarithm. The slack is for rounding.
      if (w[i] > 0 && below[i] <= 1.00001 * best * w[i]) {
        int id = b * row_.block() + i;
        double y = static_cast<double>(x[i] - density_.ref) * density_.inv_t;
        double time = noise(id) * std::exp(-y);
        if (time < best) {
          best = time;
          first = id;
        }
      }
    }
  }
  return first;
}

int ShapedRow::draw_residual(const Row* q_row, const Density& q, double u) {
  if (density_.point >= 0) {
    return density_.point;
  }
  float buffer[max_block];
  double total = 0;
  for (int b = 0; b < row_.blocks(); ++b) {
    if (q_row && !(max(q_row->read(b, buffer), row_.length(b)) < inf)) {
      return -1;
    }
    sums_[b] =
        maxima_[b] < density_.threshold ? 0 : residual(b, q_row, q, buffer);
    total += sums_[b];
  }
  if (!(total > 0)) {
    sum(density_, sums_.data());
    return draw(u);
  }
  return pick(
      u, [&](int block, float* out) { residual(block, q_row, q, out); });
}

// Reads the row once: its maximum and those of its blocks.
bool ShapedRow::read(const Row& row) {
  row_ = row;
  full_sum_ = 0;
  max_ = -inf;
  maxima_.resize(row.blocks());
  sums_.resize(row.blocks());
  float buffer[max_block];
  for (int b = 0; b < row.blocks(); ++b) {
    maxima_[b] = max(row.read(b, buffer), row.length(b));
    if (!(maxima_[b] < inf)) {
      return false;
    }
    max_ = std::max(max_, maxima_[b]);
  }
  return max_ > -inf;
}

int ShapedRow::argmax() const {
  float buffer[max_block];
  int b = std::find(maxima_.begin(), maxima_.end(), max_) - maxima_.begin();
  auto* x = row_.read(b, buffer);
  return b * row_.block() + (std::find(x, x + row_.length(b), max_) - x);
}

// The smallest logit that survives all filters.
float ShapedRow::threshold(const RowParams& params, float inv_t) {
  float filter_inv_t = params.temperature_first ? inv_t : 1.0f;
  float t = -inf;
  has_top_ = false;
  if (params.top_k > 0 && params.top_k < row_.size()) {
    t = top_k_threshold(params.top_k);
  }
  if (params.top_p < 1) {
    if (!has_top_ && row_.size() <= small_row) {
      gather(-inf);
      has_top_ = true;
    }
    Density base = {
        -1, max_, filter_inv_t, params.temperature_first ? t : -inf, 1};
    bool full = base.inv_t == 1 && base.threshold == -inf;
    double mass = full ? full_sum() : sum(base, nullptr);
    t = std::max(t, top_p_threshold(base, params.top_p * mass, t));
  }
  if (params.min_p > 0) {
    double log_min_p = std::log(static_cast<double>(params.min_p));
    t = std::max(t, static_cast<float>(max_ + log_min_p / filter_inv_t));
  }
  return t;
}

// The k-th largest logit. The k-th largest of the block maxima bounds it from
// below, and at most k - 1 blocks hold larger ones.
float ShapedRow::top_k_threshold(int k) {
  float bound = -inf;
  if (k <= row_.blocks()) {
    top_ = maxima_;
    std::nth_element(
        top_.begin(), top_.begin() + k - 1, top_.end(), std::greater<>());
    bound = top_[k - 1];
  } else if (row_.size() > small_row) {
    return select(k, -inf, nullptr);
  }
  gather(bound);
  has_top_ = true;
  if (top_.size() < static_cast<size_t>(k)) {
    return bound;
  }
  std::nth_element(
      top_.begin(), top_.begin() + k - 1, top_.end(), std::greater<>());
  float t = top_[k - 1];
  top_.erase(
      std::remove_if(top_.begin(), top_.end(), [t](float x) { return x <= t; }),
      top_.end());
  return t;
}

// Fills top_ with the logits above the bound.
void ShapedRow::gather(float bound) {
  float buffer[max_block];
  size_t count = 0;
  for (int b = 0; b < row_.blocks(); ++b) {
    if (maxima_[b] > bound) {
      auto* x = row_.read(b, buffer);
      top_.resize(count + max_block);
      for (int i = 0; i < row_.length(b); ++i) {
        top_[count] = x[i];
        count += x[i] > bound;
      }
    }
  }
  top_.resize(count);
}

// The largest t for which {z >= t} has the mass, among those above the top-k
// threshold.
float ShapedRow::top_p_threshold(
    const Density& base,
    double mass,
    float top_k_threshold) {
  if (!has_top_) {
    return select(mass, top_k_threshold, &base);
  }
  std::sort(top_.begin(), top_.end(), std::greater<>());
  double above = 0;
  for (float z : top_) {
    above += base(-1, z);
    if (above >= mass) {
      return z;
    }
  }
  return top_k_threshold;
}

// The largest t for which {z >= t} has the mass under `base`, or that many
// elements without `base`: a radix search over the bits of the logits. Blocks
// below `lower` are left out.
float ShapedRow::select(double mass, float lower, const Density* base) const {
  std::vector<double> histogram;
  double above = 0;
  uint32_t prefix = 0;
  for (auto [shift, bits] : {std::pair{21, 11}, {10, 11}, {0, 10}}) {
    fill_histogram(lower, base, prefix, shift, bits, histogram);
    // Rounding may leave the mass short: then it is the last bin with any.
    uint32_t found = 0;
    double sum = above;
    for (uint32_t bin = 1u << bits; bin-- > 0 && sum < mass;) {
      if (histogram[bin] > 0) {
        found = bin;
        above = sum;
        sum += histogram[bin];
      }
    }
    prefix = prefix << bits | found;
    lower = std::max(lower, from_key(prefix << shift));
  }
  return from_key(prefix);
}

// The mass by the next `bits` bits of the logits whose higher bits are
// `prefix`.
void ShapedRow::fill_histogram(
    float lower,
    const Density* base,
    uint32_t prefix,
    int shift,
    int bits,
    std::vector<double>& histogram) const {
  float buffer[max_block];
  float w[max_block];
  uint32_t bin[max_block];
  std::fill_n(w, max_block, 1.0f);
  // Four copies: additions to one bin in a row would wait for each other. The
  // last bin of each takes what has another prefix.
  uint32_t bins = 1u << bits;
  uint32_t first = prefix << bits;
  histogram.assign(4 * (bins + 1), 0.0);
  for (int b = 0; b < row_.blocks(); ++b) {
    if (maxima_[b] < lower) {
      continue;
    }
    int n = row_.length(b);
    auto* x = row_.read(b, buffer);
    if (!bin_keys(x, n, shift, first, bins, bin)) {
      continue;
    }
    if (base) {
      weights(x, n, *base, w);
    }
    for (int i = 0; i < n; ++i) {
      histogram[(i & 3) * (bins + 1) + bin[i]] += w[i];
    }
  }
  for (uint32_t i = 0; i < bins; ++i) {
    for (int copy = 1; copy < 4; ++copy) {
      histogram[i] += histogram[copy * (bins + 1) + i];
    }
  }
}

// The sum of the weights under p, and that of each block.
double ShapedRow::sum(const Density& p, double* sums) const {
  float buffer[max_block];
  float w[max_block];
  double total = 0;
  for (int b = 0; b < row_.blocks(); ++b) {
    double s = 0;
    if (!(maxima_[b] < p.threshold)) {
      s = weights(row_.read(b, buffer), row_.length(b), p, w);
    }
    total += s;
    if (sums) {
      sums[b] = s;
    }
  }
  return total;
}

double ShapedRow::full_sum() {
  if (full_sum_ == 0) {
    full_sum_ = sum({-1, max_, 1, -inf, 1}, nullptr);
  }
  return full_sum_;
}

double ShapedRow::residual(
    int block,
    const Row* q_row,
    const Density& q,
    float* out) const {
  float x_buffer[max_block];
  float y_buffer[max_block];
  int n = row_.length(block);
  auto* x = row_.read(block, x_buffer);
  if (q.point < 0) {
    return residuals(x, density_, q_row->read(block, y_buffer), q, n, out);
  }
  double sum = weights(x, n, density_, out);
  int i = q.point - block * row_.block();
  if (i >= 0 && i < n) {
    // Summed again: a difference would leave a rounding error of mass.
    out[i] = 0;
    sum = std::accumulate(out, out + n, 0.0);
  }
  return sum;
}

// The id at the quantile u of the masses sums_, given those within a block.
template <typename Fill>
int ShapedRow::pick(double u, Fill fill) const {
  double goal = u * std::accumulate(sums_.begin(), sums_.end(), 0.0);
  double running = 0;
  int block = 0;
  double before = 0;
  for (int b = 0; b < row_.blocks() && !(running > goal); ++b) {
    if (sums_[b] > 0) {
      block = b;
      before = running;
      running += sums_[b];
    }
  }
  float w[max_block];
  fill(block, w);
  running = before;
  int id = 0;
  for (int i = 0; i < row_.length(block) && !(running > goal); ++i) {
    if (w[i] > 0) {
      id = i;
      running += w[i];
    }
  }
  return block * row_.block() + id;
}

} // namespace mlx_mtp::cpu
