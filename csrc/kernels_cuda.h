// Declarations of all CUDA launchers. They take raw pointers, sizes and a stream; the callers (csrc/bind) have checked
// the arguments. Launches are asynchronous and throw std::runtime_error if CUDA rejects them.
#pragma once

#include <cstdint>

#include "common/arguments.h"

struct CUstream_st;  // cudaStream_t is a pointer to this, so no CUDA header is needed here

namespace swiftspec::cuda {

using Stream = CUstream_st*;

struct Channel;  // cuda/peers/channel.h
struct Device;   // cuda/device/device.h
struct RopeAppend;
struct Weights;  // cuda/linear/tiling.h
namespace tiles {
struct Tiling;      // cuda/linear/tiling.h
struct Int4Source;  // cuda/linear/repack.h
}  // namespace tiles

// ---- linear

// Sets the attributes of the linear kernels on the current device. Call it before the first launch and outside graph
// capture.
void prepare_linear(const Device& device);

// Repacks a checkpoint's matrix, int4 with groups of tiling.group or bf16 [n, k], into tiles: out [tiling.bytes()].
void repack_int4(const tiles::Tiling& tiling, const tiles::Int4Source& source, void* out, Stream stream);
void repack_bf16(const tiles::Tiling& tiling, const uint16_t* matrix, void* out, Stream stream);

// Unpacks weights to rows of bf16 for a library GEMM: out [2 * half, k] receives the `half` outputs from output
// 16 * first on, then those that lie n / 2 outputs further on.
void unpack_rows(const Weights& weights, int64_t first, int64_t half, void* out, Stream stream);

// out = epilogue(norm(x) W^T + bias) for a bfloat16 model, accumulated in float32. A row's result is bitwise
// independent of the other rows and of their number. Exactly one of out and logits is set; buffers do not overlap.
struct LinearArgs {
  const Weights* weights;
  const void* x;           // [rows, k]
  const void* norm;        // [k], weight of the RMSNorm applied to x, or null
  float eps;               // epsilon of that norm
  const void* residual;    // [rows, n], added to the rounded product, or null
  void* out;               // [rows, n]; with swiglu [rows, n / 2]; or null
  float* logits;           // [rows, n], or null
  bool swiglu;             // the first n / 2 outputs are gates of the others: SiLU(gate) * up
  const Channel* channel;  // the rounded product is summed over the ranks of a group before the residual; or null
  int64_t rows;            // 1 to tiles::kMaxRows
  // RoPE of queries and keys and the append of keys and values follow, instead of a store to `out`; or null. Only of the
  // projections for which can_append.
  const RopeAppend* append = nullptr;
};
void linear(const LinearArgs& args, Stream stream);

// Whether `linear` of this number of rows can append heads of `dim` elements.
bool can_append(const Weights& weights, int64_t rows, int64_t dim);

// `linear` by the variants kDirect and kStream, for arguments for which has_variant: few rows, without a channel, and with
// either a norm or a residual. See cuda/linear/direct.h and stream.h.
bool has_variant(const LinearArgs& args);
void linear_direct(const LinearArgs& args, Stream stream);
void linear_stream(const LinearArgs& args, Stream stream);
void prepare_direct(const Device& device);
void prepare_stream(const Device& device);

// Returns the arguments of `linear` for `rows` of the rows, from row `first` on.
LinearArgs slice_rows(LinearArgs args, int64_t first, int64_t rows);

// `linear` for large M (more than 32 rows): each launch reads the weights once for up to 64 (int4) or 128 (bf16) rows.
// The channel must be null. Returns the number of leading rows that were computed; the caller runs `linear` on the few
// that remain. `scratch`: large_m_scratch_bytes uninitialised bytes, aligned to 128. See cuda/linear/large_m.h.
int64_t large_m_scratch_bytes(const Weights& weights, int64_t rows);
int64_t linear_large_m(const LinearArgs& args, void* scratch, Stream stream);
void prepare_large_m(const Device& device);

// The first launch of linear_large_m: writes x in the layout of the matrix units to `slabs`, at the offsets of
// tiles::part_offset, to which `parts` and `all` belong.
void pack_activations(const LinearArgs& args, int parts, int all, void* slabs, Stream stream);
void prepare_pack_activations();

// `linear` for all rows of a long prefill chunk, on GPUs with wgmma. The channel must be null. int4 weights are rounded
// to bfloat16, and the order of the sums depends on the number of rows. `scratch`: prefill_scratch_bytes uninitialised
// bytes, aligned to 128; 0 bytes: the GPU has no such kernel, or the rows are too few. See cuda/linear/prefill.h.
int64_t prefill_scratch_bytes(const Weights& weights, int64_t rows);
void linear_prefill(const LinearArgs& args, void* scratch, Stream stream);
void prepare_prefill(const Device& device);

// Runs `linear` for all ranks of a group in one cooperative launch, for tests. Every element of `ranks` has a channel.
// `delays` seeds random pauses; 0 disables them.
void linear_virtual(const LinearArgs* ranks, int count, uint32_t delays, Stream stream);

// out[row] = table[tokens[row]]; row_bytes is a multiple of 16.
void embed(const int64_t* tokens, const void* table, int64_t rows, int64_t row_bytes, void* out, Stream stream);

// ---- attention

// RoPE, KV append and masked attention for bfloat16 heads of 64 or 128, over a bfloat16 or float8 cache; new keys and
// values are rounded to the type of the cache before they are used. `prepare_attention` runs once per forward,
// `attention` once per layer; see cuda/attention/attention.h. All pointers are device pointers; those that are not
// const are uninitialised scratch of the given sizes.

// Consecutive rows of one sequence, which load keys and values together.
struct alignas(16) RowGroup {
  int32_t first, count;  // rows
  int32_t base;          // number of leading slots that all rows see
  int32_t keys;          // keys of the row that sees the most
  int32_t window;        // first slot of the mask's window
  int32_t appended;      // lowest slot of the sequence that the forward writes
  int32_t unused[2];
};
constexpr int64_t kRowGroupWords = sizeof(RowGroup) / sizeof(int32_t);

// How the kernel is divided into blocks on GPUs with clusters; see the shapes in cuda/attention/sizes.h. Shapes differ
// in the order of sums.
enum class AttentionShape : int32_t { kShort, kLong, kPaired };

struct AttentionSetup {
  const void *cos, *sin;     // tables [positions, dim]; sin is negative in its first half
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows], slot of the row's own key, which is set in its mask
  const int64_t* sequence;   // [rows], or null: all rows belong to sequence 0
  const int64_t* kv_len;     // [sequences]
  const uint8_t* mask;       // [rows, width], right-aligned at kv_len
  uint16_t* queries;         // [rows, heads, dim], after RoPE
  int32_t* tail;             // [rows, width], the slots that a row sees in the window of the mask
  int32_t* count;            // [rows], number of keys that a row sees
  RowGroup* groups;          // [attention_groups]
  uint32_t* arrived;         // [attention_groups, kv_heads], clusters of a group that have finished
  float* part_values;        // [attention_lines, dim]
  float* part_sums;          // [attention_lines, 2]
  int64_t rows, width, sequences, heads, kv_heads, capacity, dim;
  int64_t clusters;  // clusters that run concurrently on the device: attention_clusters()
  float scale;       // of the scores, times log2(e)
  int32_t heads_per_kv_head, group_rows;  // group_rows: rows of a full group, attention_group_rows()
  int32_t most_parts;                     // of a sequence, attention_most_parts()
  AttentionShape shape;
  bool float8;       // keys and values of the cache are e4m3, else bfloat16
  // An earlier launch of `attention` follows `prepare_attention`: what the latter and previous forwards have written may
  // be read before the wait for the previous kernel. See attention_kernel.
  bool prepared = false;
#ifdef SWIFTSPEC_STAMPS
  uint64_t* stamps = nullptr;  // records of this launch, or null; see cuda/stamps.h
#endif
};

// Of a layer: the caches are those that `attention` gets.
struct RopeAppend {
  AttentionSetup setup;
  void *keys, *values;
};

int64_t attention_group_rows(int64_t heads, int64_t kv_heads);
int64_t attention_groups(int64_t rows, int64_t heads, int64_t kv_heads, bool one_sequence);
AttentionShape attention_shape(int64_t capacity);  // the default for caches of so many slots per sequence
// These two depend on the current device.
int64_t attention_lines(int64_t rows, int64_t heads, int64_t kv_heads, int64_t capacity, AttentionShape shape);
int attention_most_parts(int64_t kv_heads, AttentionShape shape);
int64_t attention_clusters(int64_t dim, bool float8, AttentionShape shape);  // also sets the attributes of the kernel
void prepare_attention(const AttentionSetup& setup, Stream stream);
// `qkv`: null if a projection has appended (LinearArgs::append).
void attention(const AttentionSetup& setup, const void* qkv, void* keys, void* values, void* out, Stream stream);
// The first of the two launches of `attention`, from `cos` to `slots`, `queries` and the sizes of `setup`.
void rope_append(const AttentionSetup& setup, const void* qkv, void* keys, void* values, Stream stream);

// RMSNorm of the first `heads` heads of each row of qkv [rows, width], which it overwrites; weights [heads, dim], where
// dim is 64 or 128.
void prepare_head_norm();  // sets the attributes of the kernel
void head_norm(void* qkv, const void* weight, float eps, int64_t rows, int64_t heads, int64_t width, int64_t dim,
               Stream stream);

// Runs host::move_kv on keys and values; slot_bytes is a multiple of 16. keys.source is in host memory and may be freed
// when this returns: a launch takes kMaxMovedSlots slots as arguments.
constexpr int64_t kMaxMovedSlots = 64;
void move_kv(const MoveArgs& keys, uint8_t* values, Stream stream);

// ---- sampling

// Bitwise identical to host::gumbel_rows; positions are in device memory.
void gumbel_rows(uint64_t seed, uint32_t noise_stream, const int64_t* positions, int64_t rows, uint32_t first,
                 int64_t count, float* out, Stream stream);

// host::children on device arrays; if `values` is null, host::draw (k is 1). k is at most 64.
void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, Stream stream);

// host::draw_keyed on device arrays; if `keys` is null, host::log_probs of `tokens`, which must lie in the vocabulary.
void draw_keyed(const ScoreArgs& args, const uint32_t* keys, int64_t* tokens, float* log_probs, Stream stream);

// ---- particles

// Systematic resampling, the end of an SMC round (swiftspec/smc): normalises the weights of each group and resamples
// the groups whose effective sample size is low. Rows are copied in place. The reference implementation is
// swiftspec/backends/reference/resampling.py.
constexpr int64_t kMaxParticles = 1024;  // per group

struct ResampleArgs {
  double* log_weights;  // [groups, count], set to zero when a group is resampled
  uint8_t* mask;        // [groups, count, slots]; only the first `width` columns are copied
  uint8_t* ends;        // [groups, count, ends_bytes]
  uint8_t* path;        // [groups, count, path_bytes]
  double *log_z, *ess;          // [groups], accumulated
  int64_t *resampled, *rounds;  // [groups], counters
  const double* uniform;        // [groups], in (0, 1)
  double threshold;             // a group is resampled if its effective sample size is below threshold * count
  int64_t groups, count, slots, width, ends_bytes, path_bytes;
};
void resample(const ResampleArgs& args, Stream stream);

// ---- tree

// A draft tree in device memory; see cuda/tree/tree.h.
struct TreeState {
  int64_t* token;    // [nodes]
  int32_t* parent;   // [nodes]
  int32_t* slot;     // [nodes], -1 for leaves
  double* weight;    // [nodes], log-probability summed from the root
  uint8_t* visible;  // [slots, slots], mask rows of tree slots
  int32_t* used;     // [2]: nodes, tree slots
  int32_t nodes, slots;
};

// The rows of one expansion: w leaves and the inputs of their forward.
struct Expansion {
  int32_t* node;       // [w], -1 for rows without a leaf
  int64_t* tokens;     // [w]
  int64_t* positions;  // [w]
  int64_t* slots;      // [w], from the sequence's start
  uint8_t* mask;       // [w, slots of the tree]
};

// `tree_leaves` gives the w best leaves the next tree slots and fills `out`; `prefix` [1] is the number of slots before
// the tree. `tree_add` appends k children to each node of the expansion: tokens and log-probabilities [w, k].
void tree_leaves(const TreeState& tree, int32_t w, const int64_t* prefix, const Expansion& out, Stream stream);
void tree_add(const TreeState& tree, int32_t w, const int32_t* node, int32_t k, const int64_t* tokens,
              const float* values, Stream stream);

// Replaces the tree by its root, expanded in tree slot 0, and k children: tokens and log-probabilities [k]. `token` and
// `slot` [1]: the root's, the latter counted from the sequence's start. `region` [2]: receives the number of slots
// before the tree and that up to its end.
void tree_root(const TreeState& tree, const int64_t* token, const int64_t* slot, int64_t* region, int32_t k,
               const int64_t* tokens, const float* values, Stream stream);

// ---- peers

// All-gather of 4-byte words over the LL lines of a group, two words per line: out[r, i] = mine[i] of rank r. A message
// longer than the lines is sent in several launches, each of which is one epoch.
struct GatherArgs {
  const Channel* channel;
  const uint32_t* mine;  // [count]
  uint32_t* out;         // [ranks, count]
  int64_t count;         // the same on all ranks
};
void gather(const GatherArgs& args, Stream stream);

// Runs `gather` for all ranks of a group in one cooperative launch, for tests.
void gather_virtual(const GatherArgs* ranks, int count, Stream stream);

}  // namespace swiftspec::cuda
