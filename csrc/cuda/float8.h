// Conversions of float8 e4m3 (torch.float8_e4m3fn: one sign bit, four exponent bits, three mantissa bits; maximum 448,
// no infinity). They use integer arithmetic and one multiplication, since GPUs before Ada have no instruction for them.
// For host code and device code.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/bfloat16.h"
#include "common/host_device.h"
#include "common/ieee.h"

#ifdef __CUDA_ARCH__
#include "cuda/ptx.cuh"
#endif

namespace swiftspec::float8 {

constexpr uint32_t kMaxFinite = 0x7e, kNaN = 0x7f;

// Rounds to nearest, ties to even; saturates at 448; NaN stays NaN.
SWIFTSPEC_HD uint8_t nearest(float x) {
  const uint32_t bits = ieee::bits_of(x), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint8_t>(sign | kNaN);
  uint32_t code;
  if (size < 121u << 23) {  // subnormal, below 2^-6: multiples of 2^-9, the last mantissa bit of 2^14
    code = ieee::bits_of(ieee::add(ieee::of_bits(size), 16384.0f)) - ieee::bits_of(16384.0f);
  } else {
    code = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(sign | (code < kMaxFinite ? code : kMaxFinite));
}

// Eight float8 values.
struct alignas(8) Vec8 {
  uint8_t x[8];
};
SWIFTSPEC_HD Vec8 nearest(const bf16::Vec8& chunk) {
  Vec8 out;
  for (int i = 0; i < 8; ++i) out.x[i] = nearest(bf16::widen(chunk.x[i]));
  return out;
}

// Moves bytes 2 i and 2 i + 1 of `word` to the upper bytes of its two halves.
SWIFTSPEC_HD uint32_t spread(uint32_t word, int i) {
#ifdef __CUDA_ARCH__
  return __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
#else
  word >>= 16 * i;
  return (word & 0xffu) << 8 | (word & 0xff00u) << 16;
#endif
}

// Converts the two float8 numbers in the upper bytes of the halves of `codes` to bfloat16, exactly; the codes of NaN
// are not handled. Exponent and mantissa are shifted into place, and the factor 2^120 corrects the exponent bias.
SWIFTSPEC_HD uint32_t widen_pair(uint32_t codes) {
  const uint32_t moved = (codes & 0x80008000u) | (codes & 0x7f007f00u) >> 4;
#ifdef __CUDA_ARCH__
  return ptx::bf16_fma(moved, 0x7b807b80u, 0x80008000u);
#else
  const auto wide = [](uint32_t x) { return ieee::bits_of(ieee::mul(ieee::of_bits(x), ieee::of_bits(0x7b800000u))); };
  return wide(moved << 16) >> 16 | (wide(moved & 0xffff0000u) & 0xffff0000u);
#endif
}

// Converts 16 values. If any of them is NaN, all become NaN: any sum over them would be NaN anyway.
struct Bf16x16 {
  bf16::Vec8 x[2];
};
SWIFTSPEC_HD Bf16x16 widened(const bf16::Vec8& codes) {
  uint32_t words[4], pairs[8], signs = 0;
  std::memcpy(words, &codes, sizeof words);
  SWIFTSPEC_UNROLL
  for (int i = 0; i < 4; ++i) {
    signs |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;  // a NaN carries into its sign bit
    pairs[2 * i] = widen_pair(spread(words[i], 0));
    pairs[2 * i + 1] = widen_pair(spread(words[i], 1));
  }
  if ((signs & 0x80808080u) != 0) {
    SWIFTSPEC_UNROLL
    for (uint32_t& pair : pairs) pair = 0x7fc07fc0u;
  }
  Bf16x16 out;
  std::memcpy(&out, pairs, sizeof out);
  return out;
}

}  // namespace swiftspec::float8
