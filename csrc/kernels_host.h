// Every launch, on one page. Raw pointers, sizes and (on the device) a stream; the callers have checked the
// arguments. A launch is asynchronous and throws std::runtime_error when CUDA refuses it.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

struct CUstream_st;  // cudaStream_t is a pointer to this, so no CUDA header is needed here

namespace swiftspec {

using Stream = CUstream_st*;

namespace host {

// out[row, token] = bits(row_key(seed, stream, positions[row]), token); out is rows x vocab, contiguous.
void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab,
                uint32_t* out);

// The kernels below exist for several sets of instructions. `level` is the one in use: "avx512_bf16",
// "avx512", "avx2", or "none" where the CPU or the architecture has none of them; then they throw.
// `use_level` changes it (for tests): false where this CPU has no such level.
const char* level();
bool use_level(const std::string& name);

// How many threads share a large product or a long prompt chunk, the caller's among them; 1 at first. It
// holds for the process; not to be changed while an operator runs. A forked child starts again with one.
void set_threads(int count);
int threads();

// A loop of nothing but the products that `linear` is made of, for benchmarks. Returns how many
// floating-point operations it was.
int64_t peak(int64_t rounds, bool wide);

enum class Format : uint8_t { f32, bf16, int4 };

// A projection made ready at load, in blocks of 16 outputs; see host/product.h for their layout. N is padded
// to 16, K to 8.
struct Weights {
  Format format;
  const void* data;
  const float* groups;  // int4: [N / 16][K / group][2][16]; else null
  const float* bias;    // [n], or null
  int64_t k, n, group;  // inputs, outputs; of int4 the inputs of a group, a multiple of 16 that divides k
};

// out = epilogue(norm(x) W^T + bias), sums in float32. T is float32 or bfloat16, the model's type; float32
// weights go with a float32 model. A row's result does not depend, to the bit, on the other rows. One of out
// and logits is given.
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

// RoPE on q and k, append of k and v to the cache at each row's slot, masked attention; all in T. Keys are
// taken in the order of their positions, which is the order of a row's visible slots: a row's result does not
// depend, to the bit, on the other rows or on which slots its keys have.
struct AttentionArgs {
  const void* qkv;       // [rows, (heads + 2 kv_heads) dim]
  const void* cos;       // [rows, dim]
  const void* sin;       // [rows, dim], negative in its first half
  const int64_t* slots;  // [rows]
  const uint8_t*
      mask;      // [rows, width], over the last `width` of the `length` slots in use; older ones are visible
  void* keys;    // [kv_heads, capacity, dim]
  void* values;  // the same
  void* out;     // [rows, heads dim]
  int64_t rows, heads, kv_heads, capacity, length, width;
  int64_t dim;  // of a head, a multiple of 16, at most 256
};
void attention(const AttentionArgs& args, bool wide);

// Standard Gumbel noise, -ln(-ln(1 - v)) for v = (bits + 1/2) / 2^32 held below 1: the same at every level.
void gumbel(const uint32_t* bits, int64_t count, float* out);

// out[row, i] = that noise of `noise_bits` for token first + i; out is rows x count, contiguous.
void gumbel_rows(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, uint32_t first,
                 int64_t count, float* out);

// Scores of a vocabulary: ((logits + bias) / temperature + noise) / tau, where there is a bias, a noise, a
// tau.
struct ScoreArgs {
  const float* logits;           // [rows, stride], of which the first `vocab` columns count
  const float* bias;             // [vocab], or null
  const float* noise;            // [*, vocab], or null
  const int64_t* rows_of_noise;  // [rows], which row of the noise
  float temperature, tau;        // tau only with noise
  int64_t rows, vocab, stride;
};

// gumbel_rows of rows with these keys (noise::row_key), whatever streams they belong to.
void gumbel_keyed(const uint32_t* keys, int64_t rows, uint32_t first, int64_t count, float* out);

// Per row the token of the highest score, of equal ones the first, and that score, where `values` is not null. tau
// plays no part.
void draw(const ScoreArgs& args, int64_t* tokens, float* values);

// Per row the k largest of log_softmax(scores), largest first, and their tokens. None is above 0 or NaN; a
// row without k candidates is filled up with -inf. With `totals` [rows] the values are the scores themselves, and
// logsumexp(scores) is there: the columns are one rank's, and merge.h puts them together.
void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, float* totals);

// A score as a log-probability. A parent's weight bounds its children's, so none is above 0.
inline float log_probability(float score, float total) {
  const float value = score - total;
  if (std::isnan(value)) return -std::numeric_limits<float>::infinity();
  return value <= 0.0f ? value : 0.0f;
}

// Per row log_softmax(scores) at its token; noise and tau play no part.
void log_probs(const ScoreArgs& args, const int64_t* tokens, float* out);

// Slot source[i] -> start + i, where source ascends and source[i] >= start + i. Any dtype: sizes are in
// bytes.
struct MoveArgs {
  uint8_t* region;       // layer 0 of one sequence: [kv_heads, capacity, slot_bytes]
  int64_t layer_stride;  // bytes from one layer to the next
  int64_t layers, kv_heads, capacity, slot_bytes;
  const int64_t* source;  // [count]
  int64_t count, start;
};
void move_kv(const MoveArgs& args);

}  // namespace host

namespace cuda {

void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab,
                uint32_t* out, Stream cuda_stream);

struct Channel;  // cuda/channel.h
struct Weights;  // cuda/plan.h
namespace tiles {
struct Plan;
struct Int4Source;  // cuda/tiles.h
}  // namespace tiles

// Once for each weight, outside of any graph: makes the kernels ready on the current device.
int prepare(const tiles::Plan& plan);

// plan.bytes() of tiles from a checkpoint's matrix, which is int4 with plan.group or bf16 [n, k].
void repack_int4(const tiles::Plan& plan, const tiles::Int4Source& source, void* out, Stream stream);
void repack_bf16(const tiles::Plan& plan, const uint16_t* matrix, void* out, Stream stream);

// out = epilogue(norm(x) W^T + bias) for a bfloat16 model, sums in float32. A row's result does not depend, to the
// bit, on the other rows or on their number. One of out and logits is given; no buffer is written that another is.
struct LinearArgs {
  const Weights* weights;
  const void* x;           // [rows, k]
  const void* norm;        // [k], weight of an RMSNorm in front, or null
  float eps;               // of that norm
  const void* residual;    // [rows, n], added to the rounded product, or null
  void* out;               // [rows, n]; with swiglu [rows, n / 2]; or null
  float* logits;           // [rows, n], or null
  bool swiglu;             // the first n / 2 outputs are gates of the others: SiLU(gate) * up
  const Channel* channel;  // the rounded product is summed over the ranks of a group before the residual; or null
  int64_t rows;            // 1 to tiles::kMaxRows
};
void linear(const LinearArgs& args, Stream stream);

// All ranks of a group in one cooperative launch, for tests: every args has a channel. `delays` seeds pauses; 0: none.
void linear_virtual(const LinearArgs* ranks, int count, uint32_t delays, Stream stream);

// out[r, i] = mine[i] of rank r, words of 4 bytes, over the lines of a group: (count + 1) / 2 of them.
struct GatherArgs {
  const Channel* channel;
  const uint32_t* mine;  // [count]
  uint32_t* out;         // [ranks, count]
  int64_t count;         // the same on all ranks
};
void gather(const GatherArgs& args, Stream stream);
// All ranks of a group in one cooperative launch, for tests.
void gather_virtual(const GatherArgs* ranks, int count, Stream stream);

// RoPE, KV append and masked attention for bfloat16 heads of 64 or 128, in two steps: `plan_attention` once a forward,
// `attention` once a layer. See attention.h. All pointers are the device's; those that are not const are scratch of the
// sizes named, in any state.
struct RowGroup {
  int32_t first, count;  // rows
  int32_t base;          // leading slots that all of them see
  int32_t keys;          // of the row that sees most
};

struct AttentionPlan {
  const void *cos, *sin;     // tables [positions, dim]; sin is negative in its first half
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows], of a row's own key, which its mask names
  const int64_t* sequence;   // [rows], or null: all are of sequence 0
  const int64_t* kv_len;     // [sequences]
  const uint8_t* mask;       // [rows, width], right-aligned at kv_len
  int32_t* owner;            // [sequences, capacity]
  int32_t* tail;             // [rows, width]
  int32_t* count;            // [rows]
  RowGroup* groups;          // [attention_groups]
  uint32_t* arrived;         // [attention_groups, kv_heads]
  float* part_values;        // [attention_lines, dim]
  float* part_sums;          // [attention_lines, 2]
  int64_t rows, width, sequences, heads, kv_heads, capacity, dim;
  int64_t clusters;  // that the device holds at a time, of `attention_clusters`
  float scale;       // of the scores, base 2
};
int64_t attention_groups(int64_t rows, int64_t heads, int64_t kv_heads, bool one_sequence);
int64_t attention_lines(int64_t rows, int64_t heads, int64_t capacity);
int64_t attention_clusters(int64_t dim);
void plan_attention(const AttentionPlan& plan, Stream stream);
void attention(const AttentionPlan& plan, const void* qkv, void* keys, void* values, void* out, Stream stream);

// host::gumbel_rows, to the bit, of positions on the device.
void gumbel_rows(uint64_t seed, uint32_t stream, const int64_t* positions, int64_t rows, uint32_t first, int64_t count,
                 float* out, Stream cuda_stream);

// host::children, and with `values` null host::draw (k is 1), of arrays on the device; k is at most 64.
using host::ScoreArgs;
void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, Stream stream);

// What of the draft tokens of each request the target keeps, and the token that it adds (swiftspec/spec/verify.py), of
// logits that are shaped already. Without `draft` a token stays while it is the target's own: the likeliest, or with
// `keys` the one drawn by that noise. With `draft`, rejection: `keys` then is the noise of what follows.
struct Logits {
  const void* data;
  int64_t request, position;  // elements from one to the next; those of a position are neighbours
};

struct alignas(16) PositionMark {  // what is known of a position once it has been read
  float target, draft;             // logarithms of the sums of exponentials, where there is a draft
  int32_t choice;                  // the target's own token, where there is none
  int32_t stays;                   // whether the draft's token does, if all before it do
};

struct VerifyArgs {
  Logits target;           // [batch, steps + 1, vocab]
  Logits draft;            // [batch, steps, vocab], or null
  const int64_t* tokens;   // [batch, steps], within the vocabulary
  const float* coins;      // [batch, steps], uniform in (0, 1); null without a draft
  const uint32_t* keys;    // [batch, steps + 1], noise::row_key of each position; null: no noise
  PositionMark* marks;     // [batch, steps + 1], scratch in any state
  uint32_t* arrived;       // [batch], scratch that is zero before and after
  uint8_t* accepted;       // [batch, steps]
  int64_t *count, *bonus;  // [batch]
  int64_t batch, steps, vocab;
  bool wide;  // logits are float32, else bfloat16
};
void verify(const VerifyArgs& args, Stream stream);

// host::move_kv on two buffers at once; slot_bytes is a multiple of 16.
using host::MoveArgs;
void move_kv(const MoveArgs& keys, uint8_t* values, Stream stream);

// out[row] = table[tokens[row]]; row_bytes is a multiple of 16.
void embed(const int64_t* tokens, const void* table, int64_t rows, int64_t row_bytes, void* out, Stream stream);

// RMSNorm of bfloat16 rows, rounded before the weight is applied; dim is a multiple of 8.
void rms_norm(const void* x, const void* weight, float eps, int64_t rows, int64_t dim, void* out, Stream stream);

// A draft tree on the device; see tree.h.
struct TreeState {
  int64_t* token;    // [nodes]
  int32_t* parent;   // [nodes]
  int32_t* slot;     // [nodes], -1 of leaves
  double* weight;    // [nodes], log-probability summed from the root
  uint8_t* visible;  // [slots, slots], mask rows of tree slots
  int32_t* used;     // [2]: nodes, tree slots
  int32_t nodes, slots;
};
struct Expansion {
  int32_t* node;       // [w], -1 of rows without a leaf
  int64_t* tokens;     // [w]
  int64_t* positions;  // [w]
  int64_t* places;     // [w], slots from the sequence's start
  uint8_t* mask;       // [w, slots]
};
void tree_leaves(const TreeState& tree, int32_t w, const int64_t* prefix, const Expansion& out, Stream stream);
void tree_add(const TreeState& tree, int32_t w, const int32_t* node, int32_t k, const int64_t* tokens,
              const float* values, Stream stream);

}  // namespace cuda

}  // namespace swiftspec
