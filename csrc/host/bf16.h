// AVX-512 BF16 building blocks. The functions that use them carry the target attribute, so the extension builds with any
// x86-64 compiler and the rest of it runs on any x86-64 CPU.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define SWIFTSPEC_HOST_BF16 1
#include <immintrin.h>
#define SWIFTSPEC_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")))
#define SWIFTSPEC_BF16_INLINE SWIFTSPEC_BF16 static inline
#endif

namespace swiftspec::host {

using bf16 = uint16_t;  // the upper half of a float32

inline float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Round to nearest, ties to even, as torch does; NaN stays NaN.
inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef SWIFTSPEC_HOST_BF16

SWIFTSPEC_BF16_INLINE __m512 widen16(const bf16* x) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

SWIFTSPEC_BF16_INLINE void narrow16(bf16* out, __m512 x) {
  const __m256bh half = _mm512_cvtneps_pbh(x);
  std::memcpy(out, &half, sizeof half);
}

SWIFTSPEC_BF16_INLINE __m512 round16(__m512 x) {  // to bfloat16 and back: where the reference rounds, so do we
  bf16 half[16];
  narrow16(half, x);
  return widen16(half);
}

// e^x for x <= 88: 2^n times a polynomial of degree 5 on [-ln 2 / 2, ln 2 / 2], relative error below 3e-7.
SWIFTSPEC_BF16_INLINE __m512 exp16(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

#endif  // SWIFTSPEC_HOST_BF16

}  // namespace swiftspec::host
