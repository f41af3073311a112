// Sixteen lanes in two AVX2 registers. Same functions and, operation by operation, same results as
// vector512.h. Included inside the target region and the namespace of an ISA level (level_avx2.cpp,
// level_avx_vnni.cpp).

struct F {  // sixteen float32
  __m256 a, b;
};
struct I {  // sixteen 32-bit integers
  __m256i a, b;
};

constexpr int kRowTile = 4;       // rows per tile of a product
constexpr int kAccumulators = 4;  // accumulator registers of a product
constexpr int kBlocks = 4;        // largest number of blocks per tile

inline F zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F round_even(F x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
inline unsigned greater(F x, F y) {  // bit i: x[i] > y[i]
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ));
  return static_cast<unsigned>(low | _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)) << 8);
}

inline unsigned not_less_equal(F x, F y) {  // bit i: x[i] > y[i], or one of them is NaN
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLE_UQ));
  return static_cast<unsigned>(low | _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLE_UQ)) << 8);
}

inline I broadcast_int(uint32_t x) {
  return {_mm256_set1_epi32(static_cast<int>(x)), _mm256_set1_epi32(static_cast<int>(x))};
}
inline I load_int(const void* p) {
  const __m256i* at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline void store_int(void* p, I x) {
  __m256i* at = static_cast<__m256i*>(p);
  _mm256_storeu_si256(at, x.a);
  _mm256_storeu_si256(at + 1, x.b);
}
inline I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I sub_bytes(I x, I y) { return {_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)}; }
inline I unpack_low_words(I x, I y) {  // of each quarter
  return {_mm256_unpacklo_epi16(x.a, y.a), _mm256_unpacklo_epi16(x.b, y.b)};
}
inline I unpack_high_words(I x, I y) {
  return {_mm256_unpackhi_epi16(x.a, y.a), _mm256_unpackhi_epi16(x.b, y.b)};
}
inline I sub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I mul(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline I bit_and(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I bit_or(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline I bit_xor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N>
inline I shift_left(I x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
inline I shift_right(I x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
inline I shift_right_signed(I x) {
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F unsigned_to_float(I x) {  // both halves are exact, so the sum is the only rounding
  return fma(to_float(shift_right<16>(x)), broadcast(65536.0f), to_float(bit_and(x, broadcast_int(0xffff))));
}
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }

inline F widen(const uint16_t* p) {
  const __m128i* at = reinterpret_cast<const __m128i*>(p);
  const I lanes{_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1))};
  return as_float(shift_left<16>(lanes));
}

inline F widen_half(const void* p) {
  const __m128i* at = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline F widen_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return to_float({_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}
inline F widen_bytes(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return to_float({_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
inline __m128i narrow_bytes(I x) {
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

// Adds the dot product of four unsigned and four signed bytes to each lane.
#ifdef SWIFTSPEC_DOT_INT8
inline I dot_bytes(I sum, I codes, I row) {
  return {_mm256_dpbusd_avx_epi32(sum.a, codes.a, row.a), _mm256_dpbusd_avx_epi32(sum.b, codes.b, row.b)};
}
#else
inline I pairs(I codes, I row) {  // sums of two products as 16 bits
  return {_mm256_maddubs_epi16(codes.a, row.a), _mm256_maddubs_epi16(codes.b, row.b)};
}
inline I add_halves(I x, I y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
inline I sum_halves(I x) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(x.a, ones), _mm256_madd_epi16(x.b, ones)};
}
inline I absolute_bytes(I x) { return {_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)}; }
inline I signed_as(I x, I sign) {  // -x where the byte of `sign` is negative, 0 where it is 0
  return {_mm256_sign_epi8(x.a, sign.a), _mm256_sign_epi8(x.b, sign.b)};
}
#endif

inline void store_upper_halves(uint16_t* p, I x) {  // of each lane, truncated
  const I halves = shift_right<16>(x);
  const __m256i mixed = _mm256_packus_epi32(halves.a, halves.b);  // quarters 0, 2, 1, 3
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}

inline __m256 lower(F x) { return x.a; }
inline __m256 upper(F x) { return x.b; }

// Each lane holds eight codes: nibble i belongs to input 2i and nibble 4 + i to input 2i + 1, i = 0 .. 3.
template <int N>
inline F nibble(I codes) {  // code N minus 8 as float32
  return to_float(sub(bit_and(shift_right<4 * N>(codes), broadcast_int(15)), broadcast_int(8)));
}

template <int N>
inline F float4(I codes) {  // twice the e2m1 number of code N
  const __m256 magnitudes = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
  const I index = shift_right<4 * N>(codes);  // of which the low three bits of a lane are read
  const F magnitude{_mm256_permutevar8x32_ps(magnitudes, index.a), _mm256_permutevar8x32_ps(magnitudes, index.b)};
  return as_float(bit_or(as_int(magnitude), bit_and(shift_left<28 - 4 * N>(codes), broadcast_int(0x80000000))));
}

// Returns entry `index` of an aligned table for each byte, below 16.
inline I lookup_bytes(const uint8_t (&table)[16], I index) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(both, index.a), _mm256_shuffle_epi8(both, index.b)};
}

// Transposes sixteen rows of four 32-bit words.
inline void transpose_block(const uint8_t* const (&rows)[16], int64_t offset, int64_t, uint8_t* out) {
  float* to = reinterpret_cast<float*>(out);
  for (int r = 0; r < 16; r += 4, to += 4) {
    __m128 a = _mm_loadu_ps(reinterpret_cast<const float*>(rows[r] + offset));
    __m128 b = _mm_loadu_ps(reinterpret_cast<const float*>(rows[r + 1] + offset));
    __m128 c = _mm_loadu_ps(reinterpret_cast<const float*>(rows[r + 2] + offset));
    __m128 d = _mm_loadu_ps(reinterpret_cast<const float*>(rows[r + 3] + offset));
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + 16, b);
    _mm_storeu_ps(to + 32, c);
    _mm_storeu_ps(to + 48, d);
  }
}
// 32-bit words of a row per call of transpose_block
constexpr int64_t kTransposeWords = 4;
