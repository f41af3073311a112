// float32 and float64 operations that are rounded separately: no compiler contracts them into an FMA. Also conversions
// between a float32 and its bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace swiftspec::ieee {

#ifdef __CUDA_ARCH__
SWIFTSPEC_HD float add(float a, float b) { return __fadd_rn(a, b); }
SWIFTSPEC_HD float mul(float a, float b) { return __fmul_rn(a, b); }
SWIFTSPEC_HD float div(float a, float b) { return __fdiv_rn(a, b); }
SWIFTSPEC_HD double add(double a, double b) { return __dadd_rn(a, b); }
SWIFTSPEC_HD double mul(double a, double b) { return __dmul_rn(a, b); }
SWIFTSPEC_HD uint32_t bits_of(float x) { return __float_as_uint(x); }
SWIFTSPEC_HD float of_bits(uint32_t x) { return __uint_as_float(x); }
#else
SWIFTSPEC_HD float add(float a, float b) { return a + b; }
SWIFTSPEC_HD float mul(float a, float b) { return a * b; }
SWIFTSPEC_HD float div(float a, float b) { return a / b; }
SWIFTSPEC_HD double add(double a, double b) { return a + b; }
SWIFTSPEC_HD double mul(double a, double b) { return a * b; }
SWIFTSPEC_HD uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
SWIFTSPEC_HD float of_bits(uint32_t x) {
  float value;
  std::memcpy(&value, &x, sizeof value);
  return value;
}
#endif

}  // namespace swiftspec::ieee
