// Position-keyed noise (a counter-based RNG): the random integers behind every draw, identical on every backend and
// rank. A draw is a function of (seed, stream, position, token); the generator has no state.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace swiftspec::noise {

constexpr uint32_t kGolden = 0x9E3779B9u;

// lowbias32: a bijection of 32-bit integers with low bias in every output bit.
SWIFTSPEC_HD uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// The key of one position of a noise stream, from which `bits` derives the noise of every token.
SWIFTSPEC_HD uint32_t row_key(uint64_t seed, uint32_t stream, uint32_t position) {
  uint32_t key = mix(static_cast<uint32_t>(seed) + kGolden);  // keeps seed 0 off the fixed point 0
  key = mix(key ^ static_cast<uint32_t>(seed >> 32));
  key = mix(key + stream * kGolden);
  return mix(key ^ position);
}

SWIFTSPEC_HD uint32_t bits(uint32_t key, uint32_t token) {
  return mix(mix(key + token * kGolden) ^ key);
}

// A standard Gumbel draw. The clamp keeps the uniform below 1 in float32, so the result is always finite.
SWIFTSPEC_HD float gumbel(uint32_t bits) {
  const float u = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
  const float v = u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
  return -logf(-log1pf(-v));
}

}  // namespace swiftspec::noise
