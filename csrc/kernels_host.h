// Declarations of all CPU operators. They take raw pointers and sizes, which the callers (csrc/bind) have checked.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/arguments.h"

namespace swiftspec::host {

// ---- ISA levels and threads

// Operators are compiled for several ISA levels. `level` is the one in use: on x86-64 "amx", "avx512_bf16",
// "avx512_vnni", "avx512", "avx_vnni" or "avx2", on aarch64 "neon_dotprod" or "neon", and "none" on other CPUs, where
// all operators except noise_bits and move_kv throw.
// `use_level` selects another one (for tests) and returns false if this CPU does not support it. It may be called while
// operators run: these finish at the level at which they began.
const char* level();
bool use_level(const std::string& name);

// The names of the levels that this CPU supports, the preferred one first. Without "none", so empty on other CPUs.
std::vector<std::string> supported_level_names();

// The number of threads that share large products and prompt chunks, including the caller; 1 by default. The setting is
// per process and must not change while an operator runs. A forked child starts with 1.
void set_threads(int count);
int threads();

// Arithmetic peak, for benchmarks: runs a loop of multiply-adds on the calling thread, with the first argument as the
// number of iterations. Returns the number of floating-point operations.
int64_t peak(int64_t rounds, bool is_f32);

// ---- linear

enum class Format : uint8_t { f32, bf16, int4, int8, float4 };
enum class ScaleType : uint8_t { f32, bf16, f16, u8, i8, exponent };  // exponent: a byte s, 2^(s - 127), or 0 if s is 0
constexpr int64_t kSuperInputs = 256;  // inputs per super-scale

// A projection packed at load in blocks of 16 outputs (layout: host/ops/product.h). The outputs are padded to a
// multiple of 16, the inputs to one of 8. An int4 or int8 weight is (code - zero) * scale + minimum, with one scale per
// group of inputs, and either one zero or one minimum. The codes of int8 are bytes with a zero of 128. Scales and
// minima of the types u8 and i8 are multiplied by a float16 super-scale per kSuperInputs inputs. The codes of float4 are
// e2m1 numbers, and a weight is twice the number times the scale; there are no zeros and no minima.
struct Weights {
  Format format;
  const void* data;
  const void* scales;  // int4, int8 and float4: [n / 16][k / group][16] of scale_type; else null
  ScaleType scale_type;
  const uint8_t* zeros;      // int4: [n / 16][k / group][16], or null: 0 if there are minima, otherwise 8
  const void* minima;        // [n / 16][k / group][16] of scale_type (u8 if that is i8), or null
  const void* super_scales;  // [n / 16][k / kSuperInputs][16] float16 for the scale types u8 and i8; else null
  const void* super_minima;  // the same, for minima
  const int32_t* order;      // [k], the input of x that each input of the matrix multiplies, or null: in order
  const float* bias;         // [n], or null
  int64_t k, n, group;       // inputs, outputs, inputs per group: a multiple of 16 that divides k
  // rows are quantised per group to this many int8 numbers each, 0, 1 or 2 (16 bits), and sums are integers
  int int8_activations;
};

// Gate of an MLP: the first n / 2 outputs of a projection are gates of the others, activation(gate) * up. With
// clamped_swiglu gates are at most kSwigluLimit and ups between -kSwigluLimit and kSwigluLimit, and the output is
// gate sigmoid(kSwigluAlpha gate) (up + 1).
enum class Gate : uint8_t { none, silu, gelu_tanh, clamped_swiglu };
constexpr float kSwigluLimit = 7.0f, kSwigluAlpha = 1.702f;

// out = epilogue(norm(x) W^T + bias), sums in float32. T is float32 or bfloat16; float32 weights need float32 rows, and
// products with bfloat16 weights round rows to bfloat16. A row's result does not depend on other rows (bitwise). Exactly one of out and logits is set.
struct LinearArgs {
  const Weights* weights = nullptr;
  const void* x = nullptr;         // [rows, k] T
  const float* norm = nullptr;     // [k], weight of an RMSNorm applied to x, or null
  float eps = 0.0f;                // of that norm
  const void* residual = nullptr;  // [rows, n] T, added to the rounded product; or null
  void* out = nullptr;             // [rows, n] T; with a gate [rows, n / 2]; or null
  float* logits = nullptr;         // [rows, n], or null
  Gate gate = Gate::none;
  int64_t rows = 0;
  float scale = 1.0f;    // of the outputs, before residual and soft cap; not with a gate
  float softcap = 0.0f;  // c > 0: logits s become c tanh(s / c)
};
void linear(const LinearArgs& args, bool is_f32);  // is_f32: T is float32

// into[i] += x[i] in T: the residual after an all-reduce.
void add(const void* x, int64_t count, void* into, bool is_f32);

// into += scale norm(x) for rows of n elements in T: the residual after an RMSNorm with weight `norm` [n], or null.
void norm_add(const void* x, int64_t rows, int64_t n, const float* norm, float eps, float scale, void* into,
              bool is_f32);

// gates = activation(gates) * x for rows of n elements in T. `stride`: elements between two rows of x.
void apply_gates(const void* x, int64_t stride, int64_t rows, int64_t n, Gate gate, void* gates, bool is_f32);

// x[i] *= factor in T.
void multiply(void* x, int64_t count, float factor, bool is_f32);

// ---- mixtures of experts

// A gated MLP, down(activation(gate) * up). With a router it is a mixture of experts: the router chooses
// `experts_per_token` experts for each row, and `gate_up` and `down` are those of all experts, one below the other,
// with a multiple of 16 outputs each. A shared expert is a further MLP, which computes all rows; the last output of the
// router is its gate.
struct Mlp {
  const Weights* gate_up = nullptr;  // hidden -> 2 inner; of a mixture hidden -> experts * 2 inner
  const Weights* down = nullptr;     // inner -> hidden; of a mixture inner -> experts * hidden
  Gate gate = Gate::none;
  const Weights* router = nullptr;  // hidden -> experts, and 1 with a shared expert; null: not a mixture
  int64_t experts_per_token = 0;
  bool norm_topk_prob = false;  // the weights of a row's experts are divided by their sum
  const Weights* shared_gate_up = nullptr;  // hidden -> 2 inner; null: no shared expert
  const Weights* shared_down = nullptr;     // inner -> hidden
  // [experts]: the experts are those with the largest sums of sigmoid(router(x)) and this, among those of the
  // `groups_per_token` groups with the largest sums of their two largest ones, and the weights of experts are the
  // sigmoids times `multiplier`; null: softmax
  const float* correction = nullptr;
  int64_t groups = 1, groups_per_token = 1;
  float multiplier = 1.0f;

  // The number of experts that the router chooses from; 1 without a router.
  int64_t experts() const { return router == nullptr ? 1 : router->n - (shared_down == nullptr ? 0 : 1); }
};

// out = sum over the chosen experts e of weight_e down_e(activation(gate_e) * up_e) of norm(x), where the weights are
// the largest of softmax(router(norm(x))), or sigmoids (see Mlp), plus the output of the shared expert times sigmoid(its gate). Router,
// weights and sums are float32. Reads the weights of an expert once for all rows that are routed to it. The sums are in
// the order of the experts, the shared one last, so a row's result does not depend on other rows (bitwise).
struct MixtureArgs {
  Mlp mlp;
  const void* x = nullptr;      // [rows, hidden] T
  const float* norm = nullptr;  // [hidden], weight of an RMSNorm applied to x, or null
  float eps = 0.0f;             // of that norm
  void* out = nullptr;          // [rows, hidden] T
  int64_t rows = 0;
};
void mixture(const MixtureArgs& args, bool is_f32);

// ---- attention

constexpr int64_t kMaxHeadDim = 512;

// Variations of attention. With the defaults a layer has none of them.
struct AttentionOptions {
  int64_t window = 0;                  // visible slots of a row, the last ones; 0: all
  float scale = 0.0f;                  // of the scores; 0: 1 / sqrt(dim)
  float softcap = 0.0f;                // c > 0: scores s become c tanh(s / c)
  const float* query_scale = nullptr;  // factor of a row's queries: [rows]; in the decoder [positions]
  bool norm_after_rope = false;        // of query and key heads
};

// RMSNorm of each query and key head before RoPE, or after it, and optionally of each value head; or of all query heads together and
// of all key heads together.
struct HeadNorm {
  const float* weight = nullptr;  // [heads + kv_heads, dim], with values [heads + 2 kv_heads, dim]; null: no norm
  bool values = false;
  float eps = 0.0f;
  const float* sums = nullptr;  // [rows, 2], sums of squares of all query and of all key heads; null: a norm per head
  float q_size = 1.0f, k_size = 1.0f;  // with `sums`: elements of all query and of all key heads
};

// RoPE of q and k, append of k and v to the cache at each row's slot, masked attention. All is in T, except that the
// cache of float32 states may be bfloat16: queries, keys and values are rounded to its type. Keys are summed in the
// order of positions, which is the order of a row's visible slots, so a row's result does not depend (bitwise) on other
// rows or on the slots of its keys.
struct AttentionArgs {
  const void* qkv;       // [rows, stride], of which the first (heads + 2 * kv_heads) * dim are read
  const void* cos;       // [rows, dim]
  const void* sin;       // [rows, dim], negative in its first half
  const int64_t* slots;  // [rows]
  const uint8_t* mask;   // [rows, width], over the last `width` of the `length` slots in use; earlier slots are visible
  void* keys;            // [kv_heads, capacity, dim]
  void* values;          // the same
  void* out;             // [rows, heads * dim]
  int64_t rows, heads, kv_heads, capacity, length, width;
  int64_t dim;     // head_dim, a multiple of 16, at most kMaxHeadDim
  int64_t stride;  // elements of a row of qkv
  AttentionOptions options;
  HeadNorm norm;
  const float* sinks = nullptr;  // [heads], logits whose exponentials are added to the denominators; null: none
  bool shares_kv = false;        // of qkv only heads * dim are read, and nothing is appended: an earlier layer did
};
void attention(const AttentionArgs& args, bool is_f32, bool cache_is_f32);

// sums[row] = the sums of squares of a row's query heads and of its key heads, [rows, 2]. qkv: as in AttentionArgs.
// `counted` [kv_heads]: the key heads that count; null: all.
void projection_sums(const void* qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                     const uint8_t* counted, float* sums, bool is_f32);

// KV commit: moves slots of one sequence's region, in every layer and head.
void move_kv(const MoveArgs& args);

// into *= sigmoid(gate), in T: rows of n elements. `stride`: elements between two rows of gates.
void multiply_sigmoid(const void* gate, int64_t stride, int64_t rows, int64_t n, void* into, bool is_f32);

// ---- delta layers (the gated delta rule; swiftspec/cache/delta.py documents states, slots and fold points)

constexpr int64_t kFoldPositions = 32;  // FOLD_POSITIONS in swiftspec/cache/delta.py

// Sizes of a delta layer. All heads have a multiple of 16 elements. Key heads have equal groups of value heads.
struct DeltaShape {
  int64_t k_heads, v_heads, k_dim, v_dim;
  int64_t conv_width;  // positions that the convolution reads, its own included; at most kFoldPositions
  int64_t v_size() const { return v_heads * v_dim; }
  int64_t conv_size() const { return 2 * k_heads * k_dim + v_size(); }  // channels: queries, keys, values
  bool operator==(const DeltaShape&) const = default;
};

// The delta cache of one layer and sequence. Slot 0 is the first one that is not folded.
struct DeltaSlots {
  float* state;    // [v_heads, k_dim, v_dim]
  float* keys;     // [slots, k_heads, k_dim]
  float* updates;  // [slots, v_heads, v_dim]
  float* decays;   // [slots, v_heads]
  void* inputs;    // [slots, conv_size] T
};

// What a row reads in every delta layer.
struct DeltaRow {
  int64_t row, slot;
  int64_t begin_fold, folds;  // its ancestors before its fold point: entries of `DeltaPlan::folds`
  int64_t begin, count;       // those from the fold point on and itself: entries of `DeltaPlan::visible`
};

// Rows that have the same ancestors before their fold point.
struct DeltaGroup {
  int64_t begin_fold, folds;    // these ancestors, a multiple of kFoldPositions: entries of `DeltaPlan::folds`
  int64_t begin, end;           // entries of `DeltaPlan::rows`
  int64_t begin_slot, columns;  // the slots that any of these rows sees: entries of `DeltaPlan::slots`
};

// The rows of one sequence in a forward, by fold point, then by the ancestors before it, then by slot: ancestors come
// first.
struct DeltaPlan {
  std::vector<DeltaRow> rows;
  std::vector<DeltaGroup> groups;
  std::vector<int64_t> folds;    // slots
  std::vector<int64_t> slots;    // of the groups, ascending in each
  std::vector<int64_t> visible;  // of the rows, ascending: entries of `slots`, counted from `begin_slot`
};

// `slots`, `mask`, `width`, `length`: as in AttentionArgs. `folded`: slots of the sequence that are folded.
DeltaPlan plan_delta(const int64_t* slots, const uint8_t* mask, int64_t rows, int64_t width, int64_t length,
                     int64_t folded);

// Convolution, gated delta rule, norm of each head and gate; writes the slots of the rows. Sums over ancestors are in
// the order of positions from the fold point on, so a row's result does not depend (bitwise) on other rows or on slots.
struct DeltaArgs {
  const void* projected = nullptr;  // [rows, conv_size + v_size] T: queries, keys, values, gate
  const void* rates = nullptr;      // [rows, 2 v_heads] T: of the update, before the sigmoid; of the decay
  DeltaShape shape{};
  DeltaSlots slots{};
  const DeltaPlan* plan = nullptr;
  const float* conv = nullptr;          // [conv_width, conv_size]
  const float* decay_factor = nullptr;  // [v_heads]; a decay is this times softplus(rate + bias)
  const float* decay_bias = nullptr;    // [v_heads]
  const float* norm = nullptr;          // [v_dim]
  float eps = 0.0f;                     // of that norm
  void* out = nullptr;                  // [rows, v_size] T
};
void gated_delta(const DeltaArgs& args, bool is_f32);

// Folds the first kFoldPositions slots into the state. Bitwise what `gated_delta` computes for rows whose fold point
// lies behind these slots.
void fold_delta(const DeltaShape& shape, const DeltaSlots& slots);

// ---- noise

// out[row, token] = bits(row_key(seed, stream, positions[row]), token); out is rows x vocab, contiguous.
void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab, uint32_t* out);

// Standard Gumbel noise -ln(-ln(1 - v)) with v = (bits + 1/2) / 2^32, clamped below 1; identical at every ISA level.
void gumbel(const uint32_t* bits, int64_t count, float* out);

// out[row, i] = Gumbel noise of noise_bits for token first + i; out is rows x count, contiguous.
void gumbel_rows(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, uint32_t first, int64_t count,
                 float* out);

// gumbel_rows for rows with given keys (noise::row_key), which may belong to different streams.
void gumbel_keyed(const uint32_t* keys, int64_t rows, uint32_t first, int64_t count, float* out);

// ---- sampling

// Per row the token of the highest score (the first of equal ones) and, if `values` is not null, that score. tau is
// ignored.
void draw(const ScoreArgs& args, int64_t* tokens, float* values);

// Per row the k largest of log_softmax(scores), largest first, and their tokens. Values are never above 0 or NaN;
// missing candidates are filled with -inf. If `totals` [rows] is not null, the columns are one rank's shard of the
// vocabulary: then the values are the scores themselves, and totals receives logsumexp(scores). host/decoder/merge.h
// merges the shards.
void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, float* totals);

// Converts a score to a log-probability, clamped to at most 0, since a parent's weight must bound its children's.
inline float log_probability(float score, float total) {
  const float value = score - total;
  if (std::isnan(value)) return -std::numeric_limits<float>::infinity();
  return value <= 0.0f ? value : 0.0f;
}

// Per row log_softmax(scores) at its token; noise and tau are ignored.
void log_probs(const ScoreArgs& args, const int64_t* tokens, float* out);

// Fused draw and log_probs in one pass: the token of `draw` under the noise of `gumbel_keyed` and, unless `log_probs`
// is null, its log_softmax; NaN if the token is -1. The noise of the arguments is ignored.
void draw_keyed(const ScoreArgs& args, const uint32_t* keys, int64_t* tokens, float* log_probs);

// Filters of a distribution; see swiftspec/sampling/filters.py. 0, 1 and 0 keep all tokens.
struct FilterArgs {
  int64_t top_k;
  float top_p, min_p;
};

// Per row the token of `draw` among the tokens that the filters keep, under the noise of `gumbel_keyed`; -1 also if a
// score is NaN. The noise and tau of the arguments are ignored.
void draw_filtered(const ScoreArgs& args, const FilterArgs& filter, const uint32_t* keys, int64_t* tokens);

// Writes the scores of each row to `out` [rows, stride], which may be the logits; those that the filters exclude become
// -inf. A row with a NaN, or whose highest score is infinite, is not filtered. Noise and tau are ignored.
void filter_scores(const ScoreArgs& args, const FilterArgs& filter, float* out);

}  // namespace swiftspec::host
