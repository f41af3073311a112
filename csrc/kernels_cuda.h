// Every launch on a GPU, on one page. Raw pointers, sizes and a stream; the callers have checked the arguments. A
// launch is asynchronous and throws std::runtime_error when CUDA refuses it.
#pragma once

#include <cstdint>

#include "common/arguments.h"

struct CUstream_st;  // cudaStream_t is a pointer to this, so no CUDA header is needed here

namespace swiftspec::cuda {

using Stream = CUstream_st*;

struct Channel;  // cuda/peers/channel.h
struct Device;   // cuda/device/device.h
struct Weights;  // cuda/linear/tiling.h
namespace tiles {
struct Tiling;      // cuda/linear/tiling.h
struct Int4Source;  // cuda/linear/repack.h
}  // namespace tiles

// ---- linear

// Before the first launch, outside of any graph: makes the kernels ready on the current device.
void prepare_linear(const Device& device);

// tiling.bytes() of tiles from a checkpoint's matrix, which is int4 with tiling.group or bf16 [n, k].
void repack_int4(const tiles::Tiling& tiling, const tiles::Int4Source& source, void* out, Stream stream);
void repack_bf16(const tiles::Tiling& tiling, const uint16_t* matrix, void* out, Stream stream);

// Outputs 16 first .. 16 first + half - 1 of a projection, and those half of all outputs further on, as rows of bf16:
// out [2 half, k], for a library's product.
void unpack_rows(const Weights& weights, int64_t first, int64_t half, void* out, Stream stream);

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

// The arguments of some of the rows.
LinearArgs slice_rows(LinearArgs args, int64_t first, int64_t rows);

// The same of many rows, which read the weights together, in launches of up to 64 or 128; no channel. Returns how many
// of the first rows that were: `linear` is to be asked for the others, which are few. `scratch` has `large_m_scratch_bytes` bytes
// in any state, and begins at a multiple of 128. cuda/linear/wide.h says how.
int64_t large_m_scratch_bytes(const Weights& weights, int64_t rows);
int64_t linear_large_m(const LinearArgs& args, void* scratch, Stream stream);
void prepare_large_m(const Device& device);

// The first of its launches: x to where tiles::part_at says.
void pack_activations(const LinearArgs& args, int parts, int all, void* slabs, Stream stream);
void prepare_pack_activations();

// All ranks of a group in one cooperative launch, for tests: every args has a channel. `delays` seeds pauses; 0: none.
void linear_virtual(const LinearArgs* ranks, int count, uint32_t delays, Stream stream);

// out[row] = table[tokens[row]]; row_bytes is a multiple of 16.
void embed(const int64_t* tokens, const void* table, int64_t rows, int64_t row_bytes, void* out, Stream stream);

// ---- attention

// RoPE, KV append and masked attention for bfloat16 heads of 64 or 128, over a cache of bfloat16 or of float8, where
// new keys and values count as the cache rounds them. In two steps: `prepare_attention` once a forward, `attention`
// once a layer. cuda/attention/attention.h says how. All pointers are the device's; those that are not const are
// scratch of the sizes named, in any state.
struct RowGroup {
  int32_t first, count;  // rows
  int32_t base;          // leading slots that all of them see
  int32_t keys;          // of the row that sees most
};

struct AttentionSetup {
  const void *cos, *sin;     // tables [positions, dim]; sin is negative in its first half
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows], of a row's own key, which its mask names
  const int64_t* sequence;   // [rows], or null: all are of sequence 0
  const int64_t* kv_len;     // [sequences]
  const uint8_t* mask;       // [rows, width], right-aligned at kv_len
  int32_t* owner;            // [sequences, capacity], the row whose new key a slot holds
  int32_t* tail;             // [rows, width], what a row sees of the mask's window
  int32_t* count;            // [rows], how many keys a row sees
  RowGroup* groups;          // [attention_groups]
  uint32_t* arrived;         // [attention_groups, kv_heads]
  float* part_values;        // [attention_lines, dim]
  float* part_sums;          // [attention_lines, 2]
  int64_t rows, width, sequences, heads, kv_heads, capacity, dim;
  int64_t clusters;  // that the device holds at a time, of `attention_clusters`
  float scale;       // of the scores, base 2
  bool float8;       // keys and values of the cache are e4m3, else bfloat16
};
int64_t attention_groups(int64_t rows, int64_t heads, int64_t kv_heads, bool one_sequence);
int64_t attention_lines(int64_t rows, int64_t heads, int64_t capacity);  // of the current device's kernel
int64_t attention_clusters(int64_t dim, bool float8);  // makes the kernel ready, too
void prepare_attention(const AttentionSetup& setup, Stream stream);
void attention(const AttentionSetup& setup, const void* qkv, void* keys, void* values, void* out, Stream stream);

// host::move_kv on two buffers at once; slot_bytes is a multiple of 16.
void move_kv(const MoveArgs& keys, uint8_t* values, Stream stream);

// ---- sampling

// host::gumbel_rows, to the bit, of positions on the device.
void gumbel_rows(uint64_t seed, uint32_t noise_stream, const int64_t* positions, int64_t rows, uint32_t first,
                 int64_t count, float* out, Stream stream);

// host::children, and with `values` null host::draw (k is 1), of arrays on the device; k is at most 64.
void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, Stream stream);

// host::draw_keyed; with `keys` null host::log_probs of these tokens, which must lie in the vocabulary.
void draw_keyed(const ScoreArgs& args, const uint32_t* keys, int64_t* tokens, float* log_probs, Stream stream);

// ---- particles

// Groups of particles weighed, and resampled where their weights are uneven: what a round ends with (swiftspec/smc).
// Systematic resampling; rows are copied in place. swiftspec/backends/reference/resampling.py has the same in operators.
constexpr int64_t kMaxParticles = 1024;  // of a group

struct ResampleArgs {
  double* log_weights;  // [groups, count], zeros once a group is resampled
  uint8_t* mask;        // [groups, count, slots], of which a copy takes over the first `width` columns
  uint8_t* ends;        // [groups, count, ends_bytes]
  uint8_t* path;        // [groups, count, path_bytes]
  double *log_z, *ess;  // [groups], added to
  int64_t *resampled, *rounds;  // [groups], counted on
  const double* uniform;        // [groups], in (0, 1)
  double threshold;             // a group is resampled where its effective sample size is below this share of `count`
  int64_t groups, count, slots, width, ends_bytes, path_bytes;
};
void resample(const ResampleArgs& args, Stream stream);

// ---- tree

// A draft tree on the device; see cuda/tree/tree.h.
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
  int64_t* slots;      // [w], from the sequence's start
  uint8_t* mask;       // [w, slots of the tree]
};
void tree_leaves(const TreeState& tree, int32_t w, const int64_t* prefix, const Expansion& out, Stream stream);
void tree_add(const TreeState& tree, int32_t w, const int32_t* node, int32_t k, const int64_t* tokens,
              const float* values, Stream stream);

// ---- peers

// out[r, i] = mine[i] of rank r, words of 4 bytes, over the lines of a group, two words to each. A message that is longer
// than the lines goes in pieces, a launch and an epoch for each.
struct GatherArgs {
  const Channel* channel;
  const uint32_t* mine;  // [count]
  uint32_t* out;         // [ranks, count]
  int64_t count;         // the same on all ranks
};
void gather(const GatherArgs& args, Stream stream);

// All ranks of a group in one cooperative launch, for tests.
void gather_virtual(const GatherArgs* ranks, int count, Stream stream);

}  // namespace swiftspec::cuda
