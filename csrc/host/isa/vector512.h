// Sixteen lanes in one AVX-512 register. Same functions and, operation by operation, same results as
// vector256.h. Included inside the target region and the namespace of an ISA level (level_avx512*.cpp).

using F = __m512;   // sixteen float32
using I = __m512i;  // sixteen 32-bit integers

constexpr int kRowTile = 8;        // rows per tile of a product
constexpr int kAccumulators = 16;  // accumulator registers of a product
constexpr int kBlocks = 8;         // largest number of blocks per tile

inline F zeros() { return _mm512_setzero_ps(); }
inline F broadcast(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F round_even(F x) { return _mm512_roundscale_ps(x, 0); }
inline unsigned greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }          // bit i: a[i] > b[i]
inline unsigned not_less_equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }  // or one is NaN

inline I broadcast_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline I load_int(const void* p) { return _mm512_loadu_si512(p); }
inline void store_int(void* p, I x) { _mm512_storeu_si512(p, x); }
inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I sub_bytes(I a, I b) { return _mm512_sub_epi8(a, b); }
inline I unpack_low_words(I a, I b) { return _mm512_unpacklo_epi16(a, b); }  // of each quarter
inline I unpack_high_words(I a, I b) { return _mm512_unpackhi_epi16(a, b); }
inline I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
inline I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
inline I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
template <int N>
inline I shift_left(I a) {
  return _mm512_slli_epi32(a, N);
}
template <int N>
inline I shift_right(I a) {
  return _mm512_srli_epi32(a, N);
}
template <int N>
inline I shift_right_signed(I a) {
  return _mm512_srai_epi32(a, N);
}
inline F as_float(I a) { return _mm512_castsi512_ps(a); }
inline I as_int(F a) { return _mm512_castps_si512(a); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline F unsigned_to_float(I a) { return _mm512_cvtepu32_ps(a); }
inline I to_int(F a) { return _mm512_cvtps_epi32(a); }

inline F widen(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline F widen_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline F widen_bytes(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline F widen_bytes(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m128i narrow_bytes(I x) { return _mm512_cvtepi32_epi8(x); }

// Adds the dot product of four unsigned and four signed bytes to each lane.
#ifdef SWIFTSPEC_DOT_INT8
inline I dot_bytes(I sum, I codes, I row) { return _mm512_dpbusd_epi32(sum, codes, row); }
#else
inline I pairs(I codes, I row) { return _mm512_maddubs_epi16(codes, row); }  // sums of two products as 16 bits
inline I add_halves(I a, I b) { return _mm512_add_epi16(a, b); }
inline I sum_halves(I a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
inline I absolute_bytes(I a) { return _mm512_abs_epi8(a); }
inline I signed_as(I a, I sign) {  // -a where the byte of `sign` is negative
  return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(sign), _mm512_setzero_si512(), a);
}
#endif

inline void store_upper_halves(uint16_t* p, I x) {  // of each lane, truncated
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
}

inline __m256 lower(F x) { return _mm512_castps512_ps256(x); }
inline __m256 upper(F x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)); }

// Each lane holds eight codes: nibble i belongs to input 2i and nibble 4 + i to input 2i + 1, i = 0 .. 3.
template <int N>
inline F nibble(I codes) {  // code N minus 8 as float32
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * N),
                               table);  // reads the low four bits of a lane
}

template <int N>
inline F float4(I codes) {  // twice the e2m1 number of code N
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * N), table);
}

// Returns entry `index` of an aligned table for each byte, below 16.
inline I lookup_bytes(const uint8_t (&table)[16], I index) {
  const __m128i one = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(one), index);
}

// Transposes sixteen rows of sixteen 32-bit words, or of eight if fewer than 64 `bytes` of a row are left.
inline void transpose_block(const uint8_t* const (&rows)[16], int64_t offset, int64_t bytes, uint8_t* out) {
  const bool whole = bytes >= 64;
  const __mmask16 words = whole ? 0xffff : 0x00ff;
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(words, rows[i] + offset);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // r[i + j]: of each quarter column j, rows i to i + 3
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88),
                  high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const __m512i low2 = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd),
                  high2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    _mm512_storeu_si512(out + j * 64, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(out + (4 + j) * 64, _mm512_shuffle_i32x4(low2, high2, 0x88));
    if (!whole) continue;
    _mm512_storeu_si512(out + (8 + j) * 64, _mm512_shuffle_i32x4(low, high, 0xdd));
    _mm512_storeu_si512(out + (12 + j) * 64, _mm512_shuffle_i32x4(low2, high2, 0xdd));
  }
}
// 32-bit words of a row per call of transpose_block
constexpr int64_t kTransposeWords = 16;
