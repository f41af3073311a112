// What the kernels need beyond single operations, from either set of them. Every level computes these to the
// same bits.

inline constexpr int64_t kLanes = 16;
inline constexpr int64_t kWorthSharing =
    1 << 17;  // products of two numbers: below that a thread comes too late

inline float widen_one(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// In bits, the bfloat16 next to each lane: ties to even, as torch rounds; NaN stays NaN. The upper halves
// count.
inline I to_bf16(F x) {
  const I bits = as_int(x);
  const I rounded = add(bits, add(all_int(0x7fff), both(right<16>(bits), all_int(1))));
  const I magnitude = both(bits, all_int(0x7fffffff));
  const I nan = right_signed<31>(sub(all_int(0x7f800000), magnitude));  // ones where the magnitude is greater
  return either(both(nan, all_int(0x7fc00000)), both(flip(nan, all_int(0xffffffff)), rounded));
}

// T is the model's type, float or uint16_t (a bfloat16's bits): memory in T, registers in float32.
inline F load_as(const float* p) { return load(p); }
inline F load_as(const uint16_t* p) { return widen(p); }
inline void store_as(float* p, F x) { store(p, x); }
#ifdef SWIFTSPEC_DOT_BF16
inline void store_as(uint16_t* p, F x) {  // the same but for numbers below 2^-126, which become zero
  const __m256bh half = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &half, sizeof half);
}
#else
inline void store_as(uint16_t* p, F x) { store_upper_halves(p, to_bf16(x)); }
#endif

// The first `count` of sixteen; the other lanes are zero.
template <class T>
inline F load_some(const T* p, int64_t count) {
  if (count >= kLanes) return load_as(p);
  T some[kLanes] = {};
  std::memcpy(some, p, static_cast<size_t>(count) * sizeof(T));
  return load_as(some);
}

template <class T>
inline void store_some(T* p, F x, int64_t count) {
  if (count >= kLanes) return store_as(p, x);
  T some[kLanes];
  store_as(some, x);
  std::memcpy(p, some, static_cast<size_t>(count) * sizeof(T));
}

// As if stored in T and loaded again: where the reference rounds, so do we.
template <class T>
inline F rounded(F x) {
#ifdef SWIFTSPEC_DOT_BF16
  if constexpr (sizeof(T) == sizeof(uint16_t)) {
    return as_float(left<16>(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x))));
  }
#else
  if constexpr (sizeof(T) == sizeof(uint16_t)) return as_float(both(to_bf16(x), all_int(0xffff0000)));
#endif
  return x;
}

// The sum of the lanes, always in the same order.
inline float sum(F x) {
  const __m256 eight = _mm256_add_ps(lower(x), upper(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float highest(F x) {
  const __m256 eight = _mm256_max_ps(lower(x), upper(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// e^x, x held to -87.3 .. 88: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes), relative error below
// 3e-7.
inline F exponential(F x) {
  x = smallest(largest(x, all(-87.3f)), all(88.0f));
  const F n = round_even(mul(x, all(1.44269504f)));
  F r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  F p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, all(1.0f)));
  return mul(p, as_float(left<23>(add(to_int(n), all_int(127)))));
}

// ln x for normal positive x (Cephes): within 2 units in the last place.
inline F logarithm(F x) {
  constexpr uint32_t kRootHalf = 0x3f3504f3;  // sqrt(1/2): the mantissa is taken from sqrt(1/2) to sqrt(2)
  const I shifted = sub(as_int(x), all_int(kRootHalf));
  const F e = to_float(right_signed<23>(shifted));
  const F f = sub(as_float(add(both(shifted, all_int(0x007fffff)), all_int(kRootHalf))), all(1.0f));
  const F square = mul(f, f);
  F p = all(7.0376836292e-2f);
  p = fma(p, f, all(-1.1514610310e-1f));
  p = fma(p, f, all(1.1676998740e-1f));
  p = fma(p, f, all(-1.2420140846e-1f));
  p = fma(p, f, all(1.4249322787e-1f));
  p = fma(p, f, all(-1.6668057665e-1f));
  p = fma(p, f, all(2.0000714765e-1f));
  p = fma(p, f, all(-2.4999993993e-1f));
  p = fma(p, f, all(3.3333331174e-1f));
  p = mul(mul(p, f), square);
  p = fma(e, all(-2.12194440e-4f), p);
  p = fma(square, all(-0.5f), p);
  return fma(e, all(0.693359375f), add(f, p));
}
