// The vectorised loops over one block of a row. A block is short, so that it
// and its weights stay in the first-level cache.
#pragma once

#include <cstdint>

namespace mlx_mtp::cpu {

constexpr int max_block = 256;

// p(z) = scale * exp((z - ref) * inv_t) for z >= threshold, else 0; or all mass
// on the id `point`. The reference keeps the exponent small at any temperature.
struct Density {
  int point;
  float ref;
  float inv_t;
  float threshold;
  double scale;

  double operator()(int id, float z) const;
};

// The noise of a row's tokens: exponential variates from counters.
struct Noise {
  uint32_t seed[2];
  uint32_t position;

  // That of one id: -log of a uniform in (0, 1) with 64 bits.
  double operator()(uint32_t id) const;
};

// 1 - exp(-e) of the noise e of the ids from `first` on, so at most e.
void below_noise(const Noise& noise, uint32_t first, int n, float* out);

// Values as float32.
void load_float16(const uint16_t* x, int64_t stride, int n, float* out);
void load_bfloat16(const uint16_t* x, int64_t stride, int n, float* out);
void load_float32(const float* x, int64_t stride, int n, float* out);

// Sets to -inf the values whose bit is 0.
void mask(const uint32_t* words, int64_t stride, int n, float* x);

// The largest value, NaN if there is one.
float max(const float* x, int n);

// Keys are integers of the same order as the values, one for both zeros.
float from_key(uint32_t key);

// The bin (key >> shift) - first of each value, `bins` for those outside of
// [0, bins). Returns whether any is inside.
bool bin_keys(
    const float* x,
    int n,
    int shift,
    uint32_t first,
    uint32_t bins,
    uint32_t* out);

// p / scale of each value. Returns the sum.
double weights(const float* x, int n, const Density& p, float* out);

// max(p - q, 0) of each value, neither of them a point. Returns the sum.
double residuals(
    const float* x,
    const Density& p,
    const float* y,
    const Density& q,
    int n,
    float* out);

} // namespace mlx_mtp::cpu
