// Every operator of the CPU, on one page. Raw pointers and sizes; the callers have checked the arguments.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "common/arguments.h"

namespace swiftspec::host {

// ---- instructions and threads

// The operators exist for several sets of instructions. `level` is the one in use: "avx512_bf16", "avx512", "avx2", or
// "none" where the CPU or the architecture has none of them; then all but noise_bits and move_kv throw. `use_level`
// changes it (for tests): false where this CPU has no such level.
const char* level();
bool use_level(const std::string& name);

// How many threads share a large product or a long prompt chunk, the caller's among them; 1 at first. It holds for the
// process; not to be changed while an operator runs. A forked child starts again with one.
void set_threads(int count);
int threads();

// A loop of nothing but the products that `linear` is made of, for benchmarks. Returns how many floating-point
// operations it was.
int64_t peak(int64_t rounds, bool wide);

// ---- linear

enum class Format : uint8_t { f32, bf16, int4, int8 };
enum class Scales : uint8_t { f32, bf16, f16 };

// A projection made ready at load, in blocks of 16 outputs; host/ops/product.h has their layout. N is padded to 16, K
// to 8. Of int4 and int8 a weight is (code - zero) scale, with one scale and one zero for each group of inputs.
struct Weights {
  Format format;
  const void* data;
  const void* scales;    // [N / 16][K / group][16] of `kind`; null where there are no codes
  Scales kind;
  const uint8_t* zeros;  // int4: [N / 16][K / group][16]; else null, and the zero of int8 is 128
  const float* bias;     // [n], or null
  int64_t k, n, group;   // inputs, outputs; the inputs of a group, a multiple of 16 that divides k
  bool rounds;           // each row is rounded to int8, group by group, and sums are integers; int8 has no other way
};

// out = epilogue(norm(x) W^T + bias), sums in float32. T is float32 or bfloat16, the model's type; float32 weights go
// with a float32 model. A row's result does not depend, to the bit, on the other rows. One of out and logits is given.
struct LinearArgs {
  const Weights* weights;
  const void* x;         // [rows, k] T
  const void* norm;      // [k] T, weight of an RMSNorm in front, or null
  float eps;             // of that norm
  const void* residual;  // [rows, n] T, added to the rounded product; or null
  void* out;             // [rows, n] T; with swiglu [rows, n / 2]; or null
  float* logits;         // [rows, n], or null
  bool swiglu;           // the first n / 2 outputs are gates of the others: SiLU(gate) * up
  int64_t rows;
};
void linear(const LinearArgs& args, bool wide);  // wide: T is float32

// into[i] += x[i], in T; what stands behind a product that ranks have summed.
void add(const void* x, int64_t count, void* into, bool wide);

// ---- attention

// RoPE on q and k, append of k and v to the cache at each row's slot, masked attention; all in T. Keys are taken in the
// order of their positions, which is the order of a row's visible slots: a row's result does not depend, to the bit, on
// the other rows or on which slots its keys have.
struct AttentionArgs {
  const void* qkv;       // [rows, (heads + 2 kv_heads) dim]
  const void* cos;       // [rows, dim]
  const void* sin;       // [rows, dim], negative in its first half
  const int64_t* slots;  // [rows]
  const uint8_t* mask;   // [rows, width], over the last `width` of the `length` slots in use; older ones are visible
  void* keys;            // [kv_heads, capacity, dim]
  void* values;          // the same
  void* out;             // [rows, heads dim]
  int64_t rows, heads, kv_heads, capacity, length, width;
  int64_t dim;  // of a head, a multiple of 16, at most 256
};
void attention(const AttentionArgs& args, bool wide);

// Commit: moves slots of one sequence's region, in every layer and head.
void move_kv(const MoveArgs& args);

// ---- noise

// out[row, token] = bits(row_key(seed, stream, positions[row]), token); out is rows x vocab, contiguous.
void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab, uint32_t* out);

// Standard Gumbel noise, -ln(-ln(1 - v)) for v = (bits + 1/2) / 2^32 held below 1: the same at every level.
void gumbel(const uint32_t* bits, int64_t count, float* out);

// out[row, i] = that noise of `noise_bits` for token first + i; out is rows x count, contiguous.
void gumbel_rows(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, uint32_t first, int64_t count,
                 float* out);

// gumbel_rows of rows with these keys (noise::row_key), whatever streams they belong to.
void gumbel_keyed(const uint32_t* keys, int64_t rows, uint32_t first, int64_t count, float* out);

// ---- sampling

// Per row the token of the highest score, of equal ones the first, and that score, where `values` is not null. tau
// plays no part.
void draw(const ScoreArgs& args, int64_t* tokens, float* values);

// Per row the k largest of log_softmax(scores), largest first, and their tokens. None is above 0 or NaN; a row without
// k candidates is filled up with -inf. With `totals` [rows] the values are the scores themselves, and logsumexp(scores)
// is there: the columns are one rank's, and host/decoder/merge.h puts them together.
void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, float* totals);

// A score as a log-probability. A parent's weight bounds its children's, so none is above 0.
inline float log_probability(float score, float total) {
  const float value = score - total;
  if (std::isnan(value)) return -std::numeric_limits<float>::infinity();
  return value <= 0.0f ? value : 0.0f;
}

// Per row log_softmax(scores) at its token; noise and tau play no part.
void log_probs(const ScoreArgs& args, const int64_t* tokens, float* out);

// Both in one pass: the token of `draw` under the noise of `gumbel_keyed`, made on the way, and unless `log_probs` is
// null what log_probs gives there; NaN where there is none. The noise of the arguments plays no part.
void draw_keyed(const ScoreArgs& args, const uint32_t* keys, int64_t* tokens, float* log_probs);

// A token of max(0, p - q), p and q the softmax of one row of scores each, by the noise of this key; -1 where nothing is
// left, or a score is NaN. Noise and tau of the arguments play no part.
int64_t draw_residual(const ScoreArgs& p, const ScoreArgs& q, uint32_t key);

}  // namespace swiftspec::host
