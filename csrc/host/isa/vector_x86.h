// Functions of vector256.h and vector512.h that end in 128-bit registers, the same for both.

// The sum of the lanes, in a fixed order.
inline float reduce_add(F x) {
  const __m256 eight = _mm256_add_ps(lower(x), upper(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float reduce_max(F x) {
  const __m256 eight = _mm256_max_ps(lower(x), upper(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Stores sixteen integers as signed bytes, those of each eight in the order 0 4 1 5 2 6 3 7.
inline void store_row_bytes(void* p, I x) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm_shuffle_epi8(narrow_bytes(x), order));
}
