// Vector functions composed of the operations of vector256.h, vector512.h or vector_neon.h. Their results are bitwise
// identical at every ISA level.

inline constexpr int64_t kLanes = 16;
inline constexpr int64_t kMinParallelWork = 1 << 17;  // multiply-adds; a smaller job ends before a worker has started

inline float widen_one(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Rounds each lane to bfloat16, ties to even as in torch; NaN stays NaN. The result is in the upper half of each lane.
inline I to_bf16(F x) {
  const I bits = as_int(x);
  const I rounded = add(bits, add(broadcast_int(0x7fff), bit_and(shift_right<16>(bits), broadcast_int(1))));
  const I magnitude = bit_and(bits, broadcast_int(0x7fffffff));
  const I nan = shift_right_signed<31>(sub(broadcast_int(0x7f800000), magnitude));  // all ones if NaN
  return bit_or(bit_and(nan, broadcast_int(0x7fc00000)), bit_and(bit_xor(nan, broadcast_int(0xffffffff)), rounded));
}

// Loads and stores of the model's type T, float or uint16_t (the bits of a bfloat16). Registers hold float32.
inline F load_as(const float* p) { return load(p); }
inline F load_as(const uint16_t* p) { return widen(p); }
inline void store_as(float* p, F x) { store(p, x); }
#ifdef SWIFTSPEC_DOT_BF16
inline void store_as(uint16_t* p, F x) {  // like store_as below, but subnormal numbers become zero
  const __m256bh half = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &half, sizeof half);
}
#else
inline void store_as(uint16_t* p, F x) { store_upper_halves(p, to_bf16(x)); }
#endif

// Loads up to sixteen values; the remaining lanes are zero.
template <class T>
inline F load_partial(const T* p, int64_t count) {
  if (count >= kLanes) return load_as(p);
  T some[kLanes] = {};
  std::memcpy(some, p, static_cast<size_t>(count) * sizeof(T));
  return load_as(some);
}

template <class T>
inline void store_partial(T* p, F x, int64_t count) {
  if (count >= kLanes) return store_as(p, x);
  T some[kLanes];
  store_as(some, x);
  std::memcpy(p, some, static_cast<size_t>(count) * sizeof(T));
}

// Rounds to T, at the places where the reference stores in T.
template <class T>
inline F rounded(F x) {
#ifdef SWIFTSPEC_DOT_BF16
  if constexpr (sizeof(T) == sizeof(uint16_t)) {
    return as_float(shift_left<16>(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x))));
  }
#else
  if constexpr (sizeof(T) == sizeof(uint16_t)) return as_float(bit_and(to_bf16(x), broadcast_int(0xffff0000)));
#endif
  return x;
}

// e^x with x clamped to [-87.3, 88]: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes), relative error below
// 3e-7.
inline F exponential(F x) {
  x = min(max(x, broadcast(-87.3f)), broadcast(88.0f));
  const F n = round_even(mul(x, broadcast(1.44269504f)));
  F r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  F p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, broadcast(1.0f)));
  return mul(p, as_float(shift_left<23>(add(to_int(n), broadcast_int(127)))));
}

// c tanh(x / c), absolute error below 3e-7 c.
inline F soft_cap(F x, float c) {
  const F both = exponential(mul(x, broadcast(2.0f / c)));  // e^(2 x / c)
  const F share = div(broadcast(2.0f), add(both, broadcast(1.0f)));
  return mul(broadcast(c), sub(broadcast(1.0f), share));
}

// ln x for normal positive x (Cephes), error within 2 ulp.
inline F logarithm(F x) {
  constexpr uint32_t kRootHalf = 0x3f3504f3;  // sqrt(1/2); the mantissa is in [sqrt(1/2), sqrt(2))
  const I shifted = sub(as_int(x), broadcast_int(kRootHalf));
  const F e = to_float(shift_right_signed<23>(shifted));
  const I mantissa = add(bit_and(shifted, broadcast_int(0x007fffff)), broadcast_int(kRootHalf));
  const F f = sub(as_float(mantissa), broadcast(1.0f));
  const F square = mul(f, f);
  F p = broadcast(7.0376836292e-2f);
  p = fma(p, f, broadcast(-1.1514610310e-1f));
  p = fma(p, f, broadcast(1.1676998740e-1f));
  p = fma(p, f, broadcast(-1.2420140846e-1f));
  p = fma(p, f, broadcast(1.4249322787e-1f));
  p = fma(p, f, broadcast(-1.6668057665e-1f));
  p = fma(p, f, broadcast(2.0000714765e-1f));
  p = fma(p, f, broadcast(-2.4999993993e-1f));
  p = fma(p, f, broadcast(3.3333331174e-1f));
  p = mul(mul(p, f), square);
  p = fma(e, broadcast(-2.12194440e-4f), p);
  p = fma(square, broadcast(-0.5f), p);
  return fma(e, broadcast(0.693359375f), add(f, p));
}
