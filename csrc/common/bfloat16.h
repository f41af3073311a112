// bfloat16 as 16-bit integers.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/ieee.h"

namespace swiftspec::bf16 {

SWIFTSPEC_HD float widen(uint16_t x) { return ieee::of_bits(static_cast<uint32_t>(x) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
SWIFTSPEC_HD uint16_t nearest(float x) {
  const uint32_t bits = ieee::bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Eight values in one 16-byte vector.
struct alignas(16) Vec8 {
  uint16_t x[8];
};

}  // namespace swiftspec::bf16
