// Tree attention in bfloat16: RoPE, KV append, then each row against the keys it may see. Keys are taken in the order of
// their slots, sums are float32.
#include <limits>
#include <stdexcept>
#include <vector>

#include "../kernels.h"
#include "bf16.h"

namespace swiftspec::host {

#ifdef SWIFTSPEC_HOST_BF16

namespace {

constexpr int kMaxDim = 256;   // widest head
constexpr int kMaxGroup = 16;  // most query heads of one key-value head

// x cos + half_rotation(x) sin, the sign of the rotation being in `sin`; rounded to bfloat16.
SWIFTSPEC_BF16 void rotate(const bf16* x, const bf16* cos, const bf16* sin, int dim, bf16* out) {
  const int half = dim / 2;
  for (int i = 0; i < dim; i += 16) {
    const __m512 straight = round16(_mm512_mul_ps(widen16(x + i), widen16(cos + i)));
    const __m512 turned = widen16(x + (i < half ? i + half : i - half));
    narrow16(out + i, _mm512_fmadd_ps(turned, widen16(sin + i), straight));
  }
}

// The sums of four registers, in order.
SWIFTSPEC_BF16_INLINE __m128 sum4(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 lanes = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// scores[s] = q . k[s] * scale for the keys of one head, -inf where hidden, four keys at a time (the scores have room for
// a multiple of 16; keys beyond the last are not read). Returns the largest.
SWIFTSPEC_BF16 float score(const bf16* q, const bf16* keys, const AttentionArgs& a, const uint8_t* mask, float scale,
                           float* scores) {
  for (int64_t s = 0; s < a.length; s += 4) {
    __m512 sum[4];
    for (int j = 0; j < 4; ++j) {
      const int64_t key = s + j < a.length ? s + j : a.length - 1;
      sum[j] = _mm512_setzero_ps();
      for (int i = 0; i < a.dim; i += 32) {
        const __m512bh part = (__m512bh)_mm512_loadu_si512(keys + key * a.dim + i);
        sum[j] = _mm512_dpbf16_ps(sum[j], (__m512bh)_mm512_loadu_si512(q + i), part);
      }
    }
    _mm_storeu_ps(scores + s, _mm_mul_ps(sum4(sum[0], sum[1], sum[2], sum[3]), _mm_set1_ps(scale)));
  }
  const int64_t window = a.length - a.width;  // older slots are visible
  for (int64_t s = window; s < a.length; ++s) {
    if (mask[s - window] == 0) scores[s] = -std::numeric_limits<float>::infinity();
  }
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t s = 0; s < a.length; ++s) top = scores[s] > top ? scores[s] : top;
  return top;
}

// In place: scores become e^(score - top), zero beyond `length` up to a multiple of 16. Returns their sum.
SWIFTSPEC_BF16 float soften(float* scores, int64_t length, float top) {
  const __m512 highest = _mm512_set1_ps(top);
  __m512 total = _mm512_setzero_ps();
  for (int64_t s = length; s % 16 != 0; ++s) scores[s] = -std::numeric_limits<float>::infinity();
  for (int64_t s = 0; s < length; s += 16) {
    const __m512 raw = _mm512_loadu_ps(scores + s);
    const __mmask16 seen = _mm512_cmp_ps_mask(raw, _mm512_set1_ps(-std::numeric_limits<float>::max()), _CMP_GE_OQ);
    const __m512 weight = _mm512_maskz_mov_ps(seen, exp16(_mm512_sub_ps(raw, highest)));
    _mm512_storeu_ps(scores + s, weight);
    total = _mm512_add_ps(total, weight);
  }
  return _mm512_reduce_add_ps(total);
}

// out[h] = sum over s of weights[h][s] v[s] / total[h], for the query heads of one key-value head, 32 columns at a time.
SWIFTSPEC_BF16 void gather(const float* weights, int64_t stride, const float* total, int group, const bf16* values,
                           const AttentionArgs& a, bf16* out) {
  for (int i = 0; i < a.dim; i += 32) {
    for (int first = 0; first < group; first += 4) {
      const int heads = group - first < 4 ? group - first : 4;
      __m512 sum[4][2];
      for (int h = 0; h < 4; ++h) sum[h][0] = sum[h][1] = _mm512_setzero_ps();
      for (int64_t s = 0; s < a.length; ++s) {
        const __m512 low = widen16(values + s * a.dim + i), high = widen16(values + s * a.dim + i + 16);
        for (int h = 0; h < heads; ++h) {
          const __m512 weight = _mm512_set1_ps(weights[(first + h) * stride + s]);
          sum[h][0] = _mm512_fmadd_ps(weight, low, sum[h][0]);
          sum[h][1] = _mm512_fmadd_ps(weight, high, sum[h][1]);
        }
      }
      for (int h = 0; h < heads; ++h) {
        const __m512 share = _mm512_set1_ps(1.0f / total[first + h]);
        bf16* at = out + (first + h) * a.dim + i;
        narrow16(at, _mm512_mul_ps(sum[h][0], share));
        narrow16(at + 16, _mm512_mul_ps(sum[h][1], share));
      }
    }
  }
}

}  // namespace

void attention(const AttentionArgs& a) {
  const int64_t heads = a.heads, kv_heads = a.kv_heads, dim = a.dim, width = (heads + 2 * kv_heads) * dim;
  const int group = static_cast<int>(heads / kv_heads);
  const int64_t stride = (a.length + 15) / 16 * 16;
  thread_local std::vector<float> scores;
  scores.resize(static_cast<size_t>(group * stride));
  for (int64_t row = 0; row < a.rows; ++row) {
    const bf16* k = a.qkv + row * width + heads * dim;
    for (int64_t g = 0; g < kv_heads; ++g) {
      const int64_t at = (g * a.capacity + a.slots[row]) * dim;
      rotate(k + g * dim, a.cos + row * dim, a.sin + row * dim, a.dim, a.keys + at);
      std::memcpy(a.values + at, k + (kv_heads + g) * dim, static_cast<size_t>(dim) * sizeof(bf16));
    }
  }
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  bf16 q[kMaxDim];
  float total[kMaxGroup];
  for (int64_t g = 0; g < kv_heads; ++g) {
    const bf16* keys = a.keys + g * a.capacity * dim;
    const bf16* values = a.values + g * a.capacity * dim;
    for (int64_t row = 0; row < a.rows; ++row) {
      for (int h = 0; h < group; ++h) {
        rotate(a.qkv + row * width + (g * group + h) * dim, a.cos + row * dim, a.sin + row * dim, a.dim, q);
        float* mine = scores.data() + h * stride;
        total[h] = soften(mine, a.length, score(q, keys, a, a.mask + row * a.width, scale, mine));
      }
      gather(scores.data(), stride, total, group, values, a, a.out + (row * heads + g * group) * dim);
    }
  }
}

#else

void attention(const AttentionArgs&) { throw std::runtime_error("built without AVX-512 BF16"); }

#endif

}  // namespace swiftspec::host
