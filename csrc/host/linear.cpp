// Small-M matrix products in bfloat16 with what stands before and after them fused in: RMSNorm in front; bias, residual or
// SiLU(gate) * up behind. Weights are packed [N/16][K/2][16][2], so one instruction multiplies two inputs of sixteen
// outputs for one row. Sums are float32 in the order of k: a row's result does not depend on the other rows.
#include <stdexcept>
#include <vector>

#include "../kernels.h"
#include "bf16.h"

namespace swiftspec::host {

#ifdef SWIFTSPEC_HOST_BF16

namespace {

constexpr int64_t kTile = 8;   // rows at a time: 16 accumulators and two weight registers
constexpr int64_t kBlock = 16; // outputs of a packed block

// acc[m][b] += x[m] W_b for M rows and the two blocks w0, w1.
template <int M>
SWIFTSPEC_BF16_INLINE void product(const bf16* x, int64_t k, const bf16* w0, const bf16* w1, __m512 acc[M][2]) {
  for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < k / 2; ++pair) {
    const __m512bh a = (__m512bh)_mm512_loadu_si512(w0 + pair * 32);
    const __m512bh b = (__m512bh)_mm512_loadu_si512(w1 + pair * 32);
    for (int m = 0; m < M; ++m) {
      int32_t two;
      std::memcpy(&two, x + m * k + pair * 2, sizeof two);
      const __m512bh row = (__m512bh)_mm512_set1_epi32(two);
      acc[m][0] = _mm512_dpbf16_ps(acc[m][0], a, row);
      acc[m][1] = _mm512_dpbf16_ps(acc[m][1], b, row);
    }
  }
}

SWIFTSPEC_BF16_INLINE __m512 biased(__m512 sum, const float* bias, int64_t column) {
  return bias == nullptr ? sum : _mm512_add_ps(sum, _mm512_loadu_ps(bias + column));
}

// M rows from `row` on against one block of gates and its block of ups.
template <int M>
SWIFTSPEC_BF16 void swiglu_tile(const LinearArgs& a, const bf16* x, int64_t row, int64_t column) {
  const int64_t half = a.n / 2, up = column + half;
  __m512 acc[M][2];
  product<M>(x, a.k, a.weight + column * a.k, a.weight + up * a.k, acc);
  for (int m = 0; m < M; ++m) {
    const __m512 gate = round16(biased(acc[m][0], a.bias, column));
    const __m512 rise = round16(biased(acc[m][1], a.bias, up));
    const __m512 decay = exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate));
    const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), decay));
    narrow16(a.out + (row + m) * half + column, _mm512_mul_ps(round16(silu), rise));
  }
}

// M rows from `row` on against two blocks, or against one when it is the last.
template <int M>
SWIFTSPEC_BF16 void plain_tile(const LinearArgs& a, const bf16* x, int64_t row, int64_t column) {
  const int blocks = column + kBlock < a.n ? 2 : 1;
  const bf16* first = a.weight + column * a.k;
  __m512 acc[M][2];
  product<M>(x, a.k, first, blocks == 2 ? first + kBlock * a.k : first, acc);
  for (int m = 0; m < M; ++m) {
    for (int b = 0; b < blocks; ++b) {
      const int64_t at = (row + m) * a.n + column + b * kBlock;
      const __m512 sum = biased(acc[m][b], a.bias, column + b * kBlock);
      if (a.logits != nullptr) {
        _mm512_storeu_ps(a.logits + at, sum);
      } else if (a.residual != nullptr) {
        narrow16(a.out + at, _mm512_add_ps(round16(sum), widen16(a.residual + at)));
      } else {
        narrow16(a.out + at, sum);
      }
    }
  }
}

// RMSNorm of one row of k, rounded to bfloat16 before the weight is applied, as transformers does.
SWIFTSPEC_BF16 void normalise(const bf16* x, const bf16* weight, float eps, int64_t k, bf16* out) {
  __m512 square = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 16) {
    const __m512 v = widen16(x + i);
    square = _mm512_fmadd_ps(v, v, square);
  }
  const float mean = _mm512_reduce_add_ps(square) / static_cast<float>(k);
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < k; i += 16) {
    const __m512 v = round16(_mm512_mul_ps(widen16(x + i), scale));
    narrow16(out + i, _mm512_mul_ps(v, widen16(weight + i)));
  }
}

template <int M>
void tile(const LinearArgs& a, const bf16* x, int64_t row, int64_t column, int64_t count) {
  if (count == M) {
    a.swiglu ? swiglu_tile<M>(a, x, row, column) : plain_tile<M>(a, x, row, column);
  } else if constexpr (M > 1) {
    tile<M - 1>(a, x, row, column, count);
  }
}

}  // namespace

void linear(const LinearArgs& a) {
  thread_local std::vector<bf16> scratch;  // grows to the largest input once
  const bf16* x = a.x;
  if (a.norm != nullptr) {
    scratch.resize(static_cast<size_t>(a.rows * a.k));
    for (int64_t row = 0; row < a.rows; ++row) {
      normalise(a.x + row * a.k, a.norm, a.eps, a.k, scratch.data() + row * a.k);
    }
    x = scratch.data();
  }
  // Weights outside, rows inside: every weight comes from memory once, also for a prompt chunk.
  const int64_t end = a.swiglu ? a.n / 2 : a.n, step = a.swiglu ? kBlock : 2 * kBlock;
  for (int64_t column = 0; column < end; column += step) {
    for (int64_t row = 0; row < a.rows; row += kTile) {
      const int64_t count = a.rows - row < kTile ? a.rows - row : kTile;
      tile<kTile>(a, x + row * a.k, row, column, count);
    }
  }
}

bool has_bf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#else

void linear(const LinearArgs&) { throw std::runtime_error("built without AVX-512 BF16"); }
bool has_bf16() { return false; }

#endif

}  // namespace swiftspec::host
