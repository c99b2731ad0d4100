#include "cpu/row_kernels.h"

#include <bit>
#include <cmath>
#include <limits>

// One wheel serves all x86-64 processors: the loader picks the widest version.
#if defined(__x86_64__) && defined(__GLIBC__)
#define MULTIVERSION \
  __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MULTIVERSION
#endif
#define INLINE static inline __attribute__((always_inline))

namespace mlx_mtp::cpu {

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
// exp below this is not a normal float32 and counts as 0.
constexpr float exp_min = -87.0f;

// exp(x) for exp_min <= x <= 88, within 2 ulp, NaN for NaN: exp(f) * 2^n with
// |f| <= log(2) / 2 and the polynomial of Cephes' expf.
INLINE float exp(float x) {
  constexpr float round = 0x1.8p23f;
  float t = x * 0x1.715476p0f + round;
  float n = t - round;
  float f = x - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  uint32_t power = (std::bit_cast<uint32_t>(t) << 23) + 0x3f800000u;
  return p * std::bit_cast<float>(power);
}

// NaN must pass: the caller finds unusable rows by it.
INLINE float weight(float x, float ref, float inv_t, float threshold) {
  float y = (x - ref) * inv_t;
  float e = exp(y);
  return x < threshold || y < exp_min ? 0.0f : e;
}

INLINE uint32_t key(float x) {
  auto bits = std::bit_cast<int32_t>(x + 0.0f);
  return bits ^ (bits >> 31 | std::numeric_limits<int32_t>::min());
}

INLINE float from_float16(uint16_t x) {
  uint32_t magnitude = (x & 0x7fffu) << 13;
  float value = std::bit_cast<float>(magnitude) * 0x1p112f;
  uint32_t bits = std::bit_cast<uint32_t>(value);
  bits |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(bits | (x & 0x8000u) << 16);
}

INLINE float from_bfloat16(uint16_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

// Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers:
// as easy as 1, 2, 3"), the generator of mx.random. Counter in, 64 bits out.
INLINE void threefry(const uint32_t* key, uint32_t& x, uint32_t& y) {
  constexpr int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], 0x1bd11bdau ^ key[0] ^ key[1]};
  x += keys[0];
  y += keys[1];
#pragma GCC unroll 5
  for (int i = 0; i < 5; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      int r = rotations[i % 2][j];
      x += y;
      y = (y << r | y >> (32 - r)) ^ x;
    }
    x += keys[(i + 1) % 3];
    y += keys[(i + 2) % 3] + i + 1;
  }
}

} // namespace

double Noise::operator()(uint32_t id) const {
  uint32_t x = position;
  uint32_t y = id;
  threefry(seed, x, y);
  uint64_t bits = static_cast<uint64_t>(x) << 32 | y;
  // Exact on both sides of one half.
  return x >> 31 ? -std::log((static_cast<double>(~bits) + 0.5) * 0x1p-64)
                 : -std::log1p(-(static_cast<double>(bits) + 0.5) * 0x1p-64);
}

MULTIVERSION void
below_noise(const Noise& noise, uint32_t first, int n, float* out) {
  const uint32_t key[2] = {noise.seed[0], noise.seed[1]};
  uint32_t position = noise.position;
#pragma omp simd
  for (int i = 0; i < n; ++i) {
    uint32_t x = position;
    uint32_t y = first + i;
    threefry(key, x, y);
    out[i] =
        static_cast<float>(x) * 0x1p-32f + static_cast<float>(y) * 0x1p-64f;
  }
}

double Density::operator()(int id, float z) const {
  if (point >= 0) {
    return id == point;
  }
  if (z < threshold) {
    return 0;
  }
  return scale * std::exp(static_cast<double>(z - ref) * inv_t);
}

float from_key(uint32_t key) {
  return std::bit_cast<float>(key >> 31 ? key & 0x7fffffffu : ~key);
}

MULTIVERSION void
load_float16(const uint16_t* x, int64_t stride, int n, float* out) {
  for (int i = 0; i < n; ++i) {
    out[i] = from_float16(x[i * stride]);
  }
}

MULTIVERSION void
load_bfloat16(const uint16_t* x, int64_t stride, int n, float* out) {
  for (int i = 0; i < n; ++i) {
    out[i] = from_bfloat16(x[i * stride]);
  }
}

void load_float32(const float* x, int64_t stride, int n, float* out) {
  for (int i = 0; i < n; ++i) {
    out[i] = x[i * stride];
  }
}

MULTIVERSION void mask(const uint32_t* words, int64_t stride, int n, float* x) {
  for (int i = 0; i < n; i += 32) {
    uint32_t word = words[i / 32 * stride];
    int m = n - i < 32 ? n - i : 32;
    for (int j = 0; j < m; ++j) {
      x[i + j] = (word >> j) & 1 ? x[i + j] : -inf;
    }
  }
}

// Over the bits as integers: compilers vectorise a maximum of floats only where
// they may ignore NaN.
MULTIVERSION float max(const float* x, int n) {
  constexpr int32_t low = 0x7fffffff;
  int32_t m = -low - 1;
  int32_t magnitude = 0;
  for (int i = 0; i < n; ++i) {
    auto bits = std::bit_cast<int32_t>(x[i]);
    int32_t ordered = bits ^ (bits >> 31 & low);
    m = ordered > m ? ordered : m;
    magnitude = (bits & low) > magnitude ? bits & low : magnitude;
  }
  bool nan = magnitude > std::bit_cast<int32_t>(inf);
  return nan ? std::numeric_limits<float>::quiet_NaN()
             : std::bit_cast<float>(m ^ (m >> 31 & low));
}

MULTIVERSION bool bin_keys(
    const float* x,
    int n,
    int shift,
    uint32_t first,
    uint32_t bins,
    uint32_t* out) {
  int any = 0;
#pragma omp simd reduction(| : any)
  for (int i = 0; i < n; ++i) {
    uint32_t bin = (key(x[i]) >> shift) - first;
    out[i] = bin < bins ? bin : bins;
    any |= bin < bins;
  }
  return any;
}

MULTIVERSION double
weights(const float* x, int n, const Density& p, float* out) {
  float ref = p.ref;
  float inv_t = p.inv_t;
  float threshold = p.threshold;
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < n; ++i) {
    float w = weight(x[i], ref, inv_t, threshold);
    out[i] = w;
    sum += w;
  }
  return sum;
}

MULTIVERSION double residuals(
    const float* x,
    const Density& p,
    const float* y,
    const Density& q,
    int n,
    float* out) {
  Density a = p;
  Density b = q;
  float a_scale = p.scale;
  float b_scale = q.scale;
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < n; ++i) {
    float pi = a_scale * weight(x[i], a.ref, a.inv_t, a.threshold);
    float qi = b_scale * weight(y[i], b.ref, b.inv_t, b.threshold);
    float r = pi < qi ? 0.0f : pi - qi;
    out[i] = r;
    sum += r;
  }
  return sum;
}

} // namespace mlx_mtp::cpu
