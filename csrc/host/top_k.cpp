// The k best log-probabilities of each row: one pass for the candidates, one for the normaliser.
#include <cmath>
#include <limits>
#include <stdexcept>

#include "../kernels.h"
#include "bf16.h"

namespace swiftspec::host {

#ifdef SWIFTSPEC_HOST_BF16

namespace {

// Puts a candidate in its place among the best so far, largest first; of equal ones the earlier token stays in front.
void insert(float value, int64_t token, int64_t k, float* values, int64_t* tokens) {
  int64_t at = k - 1;
  for (; at > 0 && values[at - 1] < value; --at) {
    values[at] = values[at - 1];
    tokens[at] = tokens[at - 1];
  }
  values[at] = value;
  tokens[at] = token;
}

SWIFTSPEC_BF16 void row_top_k(const float* x, int64_t vocab, int64_t k, int64_t* tokens, float* values) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < k; ++i) {
    values[i] = kNone;
    tokens[i] = i;
  }
  for (int64_t v = 0; v < vocab; v += 16) {
    const __mmask16 lanes = vocab - v < 16 ? static_cast<__mmask16>((1u << (vocab - v)) - 1) : 0xffff;
    const __m512 part = _mm512_mask_loadu_ps(_mm512_set1_ps(kNone), lanes, x + v);
    unsigned better = _mm512_cmp_ps_mask(part, _mm512_set1_ps(values[k - 1]), _CMP_GT_OQ);
    for (; better != 0; better &= better - 1) {
      const int lane = __builtin_ctz(better);
      if (x[v + lane] > values[k - 1]) insert(x[v + lane], v + lane, k, values, tokens);
    }
  }
  const __m512 top = _mm512_set1_ps(values[0]);
  __m512 total = _mm512_setzero_ps();
  for (int64_t v = 0; v < vocab; v += 16) {
    const __mmask16 lanes = vocab - v < 16 ? static_cast<__mmask16>((1u << (vocab - v)) - 1) : 0xffff;
    const __m512 part = _mm512_maskz_loadu_ps(lanes, x + v);
    total = _mm512_mask_add_ps(total, lanes, total, exp16(_mm512_sub_ps(part, top)));
  }
  const float normaliser = values[0] + std::log(_mm512_reduce_add_ps(total));
  for (int64_t i = 0; i < k; ++i) {
    const float value = values[i] - normaliser;
    values[i] = value <= 0.0f ? value : std::isnan(value) ? kNone : 0.0f;  // a parent's weight bounds its children's
  }
}

}  // namespace

void log_top_k(const float* x, int64_t rows, int64_t vocab, int64_t k, int64_t* tokens, float* values) {
  for (int64_t row = 0; row < rows; ++row) {
    row_top_k(x + row * vocab, vocab, k, tokens + row * k, values + row * k);
  }
}

#else

void log_top_k(const float*, int64_t, int64_t, int64_t, int64_t*, float*) {
  throw std::runtime_error("built without AVX-512 BF16");
}

#endif

}  // namespace swiftspec::host
