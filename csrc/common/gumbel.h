// Standard Gumbel noise, one number at a time, bitwise identical to host/ops/sampling.h, so that a GPU and a CPU sample
// the same tokens.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ieee.h"
#include "common/noise.h"

namespace swiftspec::noise {

// ln x for normal positive x, within 2 ulp; the algorithm of `logarithm` in host/isa/vector.h (Cephes).
SWIFTSPEC_HD float logarithm(float x) {
  using namespace ieee;
  constexpr uint32_t kRootHalf = 0x3f3504f3;  // sqrt(1/2): the mantissa is taken from sqrt(1/2) to sqrt(2)
  const uint32_t shifted = bits_of(x) - kRootHalf;
  const auto e = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const float f = add(of_bits((shifted & 0x007fffff) + kRootHalf), -1.0f);
  const float square = mul(f, f);
  float p = 7.0376836292e-2f;
  p = fmaf(p, f, -1.1514610310e-1f);
  p = fmaf(p, f, 1.1676998740e-1f);
  p = fmaf(p, f, -1.2420140846e-1f);
  p = fmaf(p, f, 1.4249322787e-1f);
  p = fmaf(p, f, -1.6668057665e-1f);
  p = fmaf(p, f, 2.0000714765e-1f);
  p = fmaf(p, f, -2.4999993993e-1f);
  p = fmaf(p, f, 3.3333331174e-1f);
  p = mul(mul(p, f), square);
  p = fmaf(e, -2.12194440e-4f, p);
  p = fmaf(square, -0.5f, p);
  return fmaf(e, 0.693359375f, add(f, p));
}

// -ln(-ln(1 - v)) for v = (bits + 1/2) / 2^32, clamped below 1.
SWIFTSPEC_HD float gumbel_exact(uint32_t bits) {
  using namespace ieee;
  const float raw = mul(add(static_cast<float>(bits), 0.5f), 0x1p-32f);
  const float v = raw < 1.0f - 0x1p-24f ? raw : 1.0f - 0x1p-24f;
  const float u = add(1.0f, -v);
  const float left_out = div(add(add(1.0f, -u), -v), u);  // rounding error of 1 - v, relative to u
  return add(0.0f, -logarithm(add(add(0.0f, -logarithm(u)), -left_out)));
}

}  // namespace swiftspec::noise
