// Decoder forward as one call: embedding, layers, LM head. It runs the operators of kernels_host.h on buffers that grow
// to the largest forward.
#pragma once

#include <cstdint>
#include <vector>

#include "host/decoder/model_cache.h"
#include "host/shm/ll_shm.h"
#include "kernels_host.h"

namespace swiftspec::host {

// RoPE tables, sizes and options of the attention layers of one kind.
struct AttentionKind {
  int64_t heads, kv_heads, dim;
  int64_t cache;             // index of its KV cache
  const void* cos;           // [positions, dim] T
  const void* sin;           // the same, negative in its first half
  AttentionOptions options;  // with query_scale [positions]
  // if the norms of the layers are of whole projections: elements of all query and of all key heads of all ranks, and
  // the key heads that count [kv_heads], null: all; otherwise 0
  int64_t q_size = 0, k_size = 0;
  const uint8_t* counted = nullptr;
  bool output_gate = false;  // `qkv` has heads dim further outputs, whose sigmoid multiplies the output
};

// Weights of a delta layer besides its two projections; see DeltaArgs.
struct DeltaWeights {
  const Weights* rates = nullptr;  // hidden -> 2 v_heads; null: the layer is an attention layer
  const float *conv = nullptr, *decay_factor = nullptr, *decay_bias = nullptr, *norm = nullptr;
};

// What computes the per-layer embeddings of a token x: for each layer
// (norm(projection(embedding[x])) + multiplier table[x]) / sqrt(2). ModelSpec.per_layer_size documents them.
struct PerLayerEmbeddings {
  int64_t size = 0;  // elements for one layer; 0: the model has none
  const void* table = nullptr;  // [vocab, layers * size] S
  float multiplier = 1.0f;
  const Weights* projection = nullptr;  // hidden -> layers * size
  const float* norm = nullptr;          // [size], of the part of each layer
  float eps = 0.0f;                     // of that norm
};

// What adds them in a layer: norm(projection(activation(gate(x)) * embedding)). The same on every rank.
struct PerLayerPart {
  const Weights* gate = nullptr;        // hidden -> size; null: the model has none
  const Weights* projection = nullptr;  // size -> hidden
  const float* norm = nullptr;          // [hidden]
  Gate activation = Gate::none;
};

// A norm is null if the layer does not have it.
struct PackedLayer {
  const float* input_norm;  // [hidden]
  // hidden -> (heads + 2 kv_heads) dim of its kind, heads dim if it shares the keys and values of an earlier layer, or
  // conv_size + v_size in a delta layer
  const Weights* qkv;
  const Weights* o;         // heads dim -> hidden, or v_size -> hidden
  const float* mlp_norm;    // [hidden], before the MLP
  Mlp mlp;
  int64_t kind;  // index in `PackedModel::kinds`
  HeadNorm head_norm;
  const float* mixer_output_norm;  // [hidden]
  const float* mlp_output_norm;    // [hidden]
  float residual_multiplier;       // of the outputs of attention and MLP
  float output_scale;              // of the output of the layer
  const float* sinks;              // [heads], see AttentionArgs
  int64_t cache_layer;             // index of the layer, or of that earlier one, in its KV cache or the delta cache
  DeltaWeights delta;
  PerLayerPart per_layer{};
  bool shares_kv = false;
};

// The weights of a model, or of one rank's shard. T, the type of the residual stream, is float32 or bfloat16; S, that of
// embeddings and KV cache, is T or bfloat16.
struct PackedModel {
  bool is_f32;         // T is float32
  bool stores_f32;     // S is float32
  float eps;    // of every RMSNorm
  int64_t hidden;
  int64_t vocab, positions;  // rows of the embedding; rows of the RoPE tables
  const void* embedding;     // [vocab, hidden] S
  float embedding_multiplier;
  std::vector<AttentionKind> kinds;
  const float* norm;  // [hidden], final RMSNorm
  const Weights* head;
  float logit_multiplier, logit_softcap;  // a soft cap of 0: none
  ShmGroup* group;   // all-reduces the outputs of `o` and of the MLP, or null
  double timeout_s;  // limit of each all-reduce, in seconds
  DeltaShape delta{};  // of all delta layers; all zeros: the model has none
  PerLayerEmbeddings per_layer{};
};

// The consecutive rows of one sequence.
struct SequenceRows {
  int64_t first, rows;
  const uint8_t* mask;    // [rows, width]; see AttentionArgs
  int64_t width, length;  // `length`: slots in use
  int64_t sequence;       // index in the caches
};

struct ForwardArgs {
  const int64_t* tokens;     // [rows]
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows]
  int64_t rows;
  std::vector<SequenceRows> sequence_rows;
  const ModelCache* cache;
  int64_t logits_from;  // earlier rows have no logits
  float* logits;        // [rows - logits_from, outputs of the head], or null
  const std::vector<int64_t>* logit_rows = nullptr;  // instead of the rows from logits_from on: only these
};

class Decoder {
 public:
  // `hidden_layers`: the layers whose hidden states each forward keeps.
  Decoder(const PackedModel& model, std::vector<PackedLayer> layers, std::vector<int64_t> hidden_layers = {});

  // Writes the states of the rows to the caches, and `logits`. Without logits and hidden states that are kept, the layers
  // after the last one that writes to a cache are skipped. Throws the exceptions of ShmGroup::all_reduce, and
  // std::invalid_argument if a sequence has more slots in use than the delta cache.
  void forward(const ForwardArgs& args);

  const PackedModel& model() const { return model_; }
  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }
  const std::vector<int64_t>& kv_layers() const { return kv_layers_; }  // number of layers of each KV cache
  int64_t delta_layers() const { return delta_layers_; }

  // The hidden states of the last forward, that of a native round included: [hidden_rows, num_hidden_layers, hidden] T,
  // the residual stream after each of the `hidden_layers`.
  const void* hidden_states() const { return hidden_states_.data(); }
  int64_t hidden_rows() const { return hidden_rows_; }  // 0 without `hidden_layers`, and after a failed forward
  int64_t num_hidden_layers() const { return static_cast<int64_t>(hidden_layers_.size()); }

 private:
  using Buffer = std::vector<uint8_t>;

  void* reserve(Buffer& buffer, int64_t elements) const;
  void* embed(const void* table, const ForwardArgs& args, int64_t width, Buffer& to) const;
  void gather(const ForwardArgs& args);
  void embed_per_layer(const ForwardArgs& args);
  std::vector<DeltaPlan> plan_deltas(const ForwardArgs& args) const;
  void mix(const ForwardArgs& args, const PackedLayer& layer, const std::vector<DeltaPlan>& plans);
  void attend(const ForwardArgs& args, const PackedLayer& layer);
  void apply_delta(const ForwardArgs& args, const PackedLayer& layer, const std::vector<DeltaPlan>& plans);
  void add_linear(const Weights& weights, const void* x, int64_t rows, const float* norm, float multiplier);
  void add_product(int64_t rows, const float* norm, float multiplier);
  void add_mlp(const PackedLayer& layer, int64_t rows);
  void add_per_layer(int64_t layer, int64_t rows);
  void keep_hidden(int64_t layer, int64_t rows);

  PackedModel model_;
  std::vector<PackedLayer> layers_;
  std::vector<int64_t> hidden_layers_;
  std::vector<int64_t> kv_layers_;
  size_t writing_layers_ = 0;  // the number of layers up to the last one that writes to a cache
  int64_t delta_layers_ = 0, hidden_rows_ = 0;
  int64_t size_;                    // sizeof(T)
  std::vector<Buffer> cos_, sin_;   // by kind of attention layer
  std::vector<std::vector<float>> query_scale_;
  std::vector<float> projection_sums_;
  Buffer hidden_, projected_, rates_, mixed_, product_, per_layer_, hidden_states_;
};

}  // namespace swiftspec::host
