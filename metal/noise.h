// The noise of coupled draws, a function of a key, a position and an id.
#pragma once

#include "prelude.h"

struct Words {
  uint x;
  uint y;
};

METAL_FUNC Words mix(Words w, uint rotation) {
  w.x += w.y;
  w.y = (w.y << rotation | w.y >> (32u - rotation)) ^ w.x;
  return w;
}

METAL_FUNC Words mix4(Words w, uint a, uint b, uint c, uint d) {
  return mix(mix(mix(mix(w, a), b), c), d);
}

METAL_FUNC Words add_words(Words w, uint x, uint y) {
  return Words{w.x + x, w.y + y};
}

// Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers:
// as easy as 1, 2, 3"), as on the CPU.
METAL_FUNC Words threefry(Words key, Words counter) {
  uint third = 0x1bd11bdau ^ key.x ^ key.y;
  Words w = add_words(counter, key.x, key.y);
  w = add_words(mix4(w, 13, 15, 26, 6), key.y, third + 1u);
  w = add_words(mix4(w, 17, 29, 16, 24), third, key.x + 2u);
  w = add_words(mix4(w, 13, 15, 26, 6), key.x, key.y + 3u);
  w = add_words(mix4(w, 17, 29, 16, 24), key.y, third + 4u);
  return add_words(mix4(w, 13, 15, 26, 6), third, key.x + 5u);
}

// An exponential variate of 64 bits, to a few units of its last place.
METAL_FUNC float exponential(Words w) {
  constexpr float HIGH = 2.3283064365386963e-10f; // 2^-32
  constexpr float LOW = 5.421010862427522e-20f; // 2^-64
  if (w.x >> 31) {
    return -metal::log(float(~w.x) * HIGH + (float(~w.y) + 0.5f) * LOW);
  }
  // log1p by Kahan's quotient, which corrects the rounding of 1 - v.
  float v = float(w.x) * HIGH + (float(w.y) + 0.5f) * LOW;
  float rest = 1.0f - v;
  return rest == 1.0f ? v : -metal::log(rest) * (v / (1.0f - rest));
}
