#include "cpu/shaped_row.h"

#include <algorithm>
#include <cmath>

namespace mlx_mtp::cpu {

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();

// The largest t for which {z >= t} has at least `mass`, z sorted descending.
template <typename F>
float mass_threshold(const std::vector<float>& z, double mass, F weight) {
  double sum = 0;
  for (float x : z) {
    sum += weight(x);
    if (sum >= mass) {
      return x;
    }
  }
  return z.back();
}

// The first id whose running sum exceeds u times the total.
template <typename F>
int quantile(int size, double u, F weight) {
  double total = 0;
  for (int i = 0; i < size; ++i) {
    total += weight(i);
  }
  double sum = 0;
  int last = -1;
  for (int i = 0; i < size; ++i) {
    double w = weight(i);
    if (w > 0) {
      last = i;
      sum += w;
      if (sum > u * total) {
        return i;
      }
    }
  }
  return last;
}

} // namespace

bool RowParams::valid() const {
  return temperature >= 0 && temperature < inf && top_k >= 0 && top_p > 0 &&
      top_p <= 1 && min_p >= 0 && min_p <= 1;
}

double Density::operator()(int id, float z) const {
  if (point >= 0) {
    return id == point;
  }
  if (!(z >= threshold)) {
    return std::isnan(z) ? z : 0;
  }
  return scale * std::exp(static_cast<double>(z - ref) * inv_t);
}

bool ShapedRow::shape(const Row& row, const RowParams& params) {
  row_ = &row;
  int V = row.size();
  std::vector<float> z(V);
  int best = 0;
  for (int i = 0; i < V; ++i) {
    z[i] = row[i];
    if (!(z[i] < inf)) {
      return false;
    }
    if (z[i] > z[best]) {
      best = i;
    }
  }
  float m = z[best];
  if (m == -inf) {
    return false;
  }
  auto weight = [m](float inv_t) {
    return [m, inv_t](float x) {
      return std::exp(static_cast<double>(x - m) * inv_t);
    };
  };
  std::sort(z.begin(), z.end(), std::greater<float>());
  double sum1 = 0;
  for (float x : z) {
    sum1 += weight(1)(x);
  }
  log_sum_ = m + std::log(sum1);

  density_ = Density();
  float inv_t = 1 / params.temperature;
  if (inv_t == inf) {
    density_.point = best;
    density_.inv_t = inv_t;
    density_.threshold = m;
    return true;
  }
  float t = -inf;
  if (params.top_k > 0 && params.top_k < V) {
    t = z[static_cast<int>(params.top_k) - 1];
  }
  float filter_inv_t = params.temperature_first ? inv_t : 1.0f;
  if (params.top_p < 1) {
    double mass = 0;
    for (float x : z) {
      mass += x >= t || !params.temperature_first ? weight(filter_inv_t)(x) : 0;
    }
    t = std::max(
        t, mass_threshold(z, params.top_p * mass, weight(filter_inv_t)));
  }
  if (params.min_p > 0) {
    t = std::max(
        t,
        static_cast<float>(
            m + std::log(static_cast<double>(params.min_p)) / filter_inv_t));
  }
  double sum = 0;
  for (float x : z) {
    sum += x >= t ? weight(inv_t)(x) : 0;
  }
  density_.ref = m;
  density_.inv_t = inv_t;
  density_.threshold = t;
  density_.scale = 1 / sum;
  return true;
}

double ShapedRow::log_sum() const {
  if (density_.point >= 0) {
    return 0;
  }
  return static_cast<double>(density_.ref) * density_.inv_t -
      std::log(density_.scale);
}

int ShapedRow::draw(double u) const {
  if (density_.point >= 0) {
    return density_.point;
  }
  return quantile(row_->size(), u, [&](int i) { return probability(i); });
}

int ShapedRow::draw_residual(const Row& q_row, const Density& q, double u)
    const {
  bool usable = true;
  int id = quantile(row_->size(), u, [&](int i) {
    double qi = q(i, q_row[i]);
    usable &= qi < inf;
    return std::max(probability(i) - qi, 0.0);
  });
  if (!usable) {
    return -1;
  }
  return id < 0 ? draw(u) : id;
}

} // namespace mlx_mtp::cpu
