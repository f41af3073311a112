#include "host/decoder/decoder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace swiftspec::host {

namespace {

uint8_t* at(void* base, int64_t bytes) { return static_cast<uint8_t*>(base) + bytes; }
const uint8_t* at(const void* base, int64_t bytes) { return static_cast<const uint8_t*>(base) + bytes; }

// out[i] = table[index[i]], rows of `bytes`.
void gather_rows(const void* table, const int64_t* index, int64_t rows, int64_t bytes, void* out) {
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(at(out, i * bytes), at(table, index[i] * bytes), static_cast<size_t>(bytes));
  }
}

}  // namespace

Decoder::Decoder(const PackedModel& model, std::vector<PackedLayer> layers, std::vector<int64_t> hidden_layers)
    : model_(model),
      layers_(std::move(layers)),
      hidden_layers_(std::move(hidden_layers)),
      size_(model.is_f32 ? 4 : 2),
      cos_(model.kinds.size()),
      sin_(model.kinds.size()),
      query_scale_(model.kinds.size()) {
  for (const AttentionKind& kind : model_.kinds) {
    kv_layers_.resize(std::max(kv_layers_.size(), static_cast<size_t>(kind.cache) + 1));
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    const PackedLayer& layer = layers_[i];
    if (layer.shares_kv) continue;
    writing_layers_ = i + 1;
    if (layer.delta.rates != nullptr) {
      ++delta_layers_;
    } else {
      ++kv_layers_[static_cast<size_t>(model_.kinds[static_cast<size_t>(layer.kind)].cache)];
    }
  }
}

// Returns the buffer, which grows to the largest forward.
void* Decoder::reserve(Buffer& buffer, int64_t elements) const {
  const auto bytes = static_cast<size_t>(elements * size_);
  if (buffer.size() < bytes) buffer.resize(bytes);
  return buffer.data();
}

// Writes the rows of the tokens in `table` [vocab, width] S to `to`, in T.
void* Decoder::embed(const void* table, const ForwardArgs& args, int64_t width, Buffer& to) const {
  void* out = reserve(to, args.rows * width);
  if (model_.is_f32 == model_.stores_f32) {
    gather_rows(table, args.tokens, args.rows, width * size_, out);
    return out;
  }
  auto* wide = static_cast<uint32_t*>(out);
  for (int64_t row = 0; row < args.rows; ++row, wide += width) {
    const uint16_t* from = static_cast<const uint16_t*>(table) + args.tokens[row] * width;
    for (int64_t i = 0; i < width; ++i) wide[i] = static_cast<uint32_t>(from[i]) << 16;
  }
  return out;
}

void Decoder::gather(const ForwardArgs& args) {
  const PackedModel& s = model_;
  embed(s.embedding, args, s.hidden, hidden_);
  if (s.embedding_multiplier != 1.0f) {
    multiply(hidden_.data(), args.rows * s.hidden, s.embedding_multiplier, s.is_f32);
  }
  for (size_t i = 0; i < s.kinds.size(); ++i) {
    const AttentionKind& kind = s.kinds[i];
    gather_rows(kind.cos, args.positions, args.rows, kind.dim * size_, reserve(cos_[i], args.rows * kind.dim));
    gather_rows(kind.sin, args.positions, args.rows, kind.dim * size_, reserve(sin_[i], args.rows * kind.dim));
    if (kind.options.query_scale == nullptr) continue;
    query_scale_[i].resize(static_cast<size_t>(args.rows));
    gather_rows(kind.options.query_scale, args.positions, args.rows, 4, query_scale_[i].data());
  }
}

// Writes the per-layer embeddings of the tokens to `per_layer_` [rows, layers, size], after `gather`.
void Decoder::embed_per_layer(const ForwardArgs& args) {
  const PackedModel& s = model_;
  const PerLayerEmbeddings& weights = s.per_layer;
  if (weights.size == 0) return;
  const int64_t width = layers() * weights.size, count = args.rows * width;
  constexpr float kScale = 0.70710678f;  // 1 / sqrt(2)
  embed(weights.table, args, width, per_layer_);
  if (weights.multiplier != 1.0f) multiply(per_layer_.data(), count, weights.multiplier, s.is_f32);
  linear({.weights = weights.projection, .x = hidden_.data(), .out = reserve(projected_, count), .rows = args.rows},
         s.is_f32);
  norm_add(projected_.data(), args.rows * layers(), weights.size, weights.norm, weights.eps, 1.0f, per_layer_.data(),
           s.is_f32);
  multiply(per_layer_.data(), count, kScale, s.is_f32);
}

// The plan of each of the sequences; none without delta layers.
std::vector<DeltaPlan> Decoder::plan_deltas(const ForwardArgs& args) const {
  std::vector<DeltaPlan> plans;
  const DeltaCache* delta = args.cache->delta;
  if (delta == nullptr) return plans;
  for (const SequenceRows& seq : args.sequence_rows) {
    const int64_t folded = delta->folded[seq.sequence];
    if (seq.length - folded > delta->slots) throw std::invalid_argument("more slots than the delta cache has");
    plans.push_back(plan_delta(args.slots + seq.first, seq.mask, seq.rows, seq.width, seq.length, folded));
  }
  return plans;
}

// The token mixer of a layer, from `hidden_` to `mixed_`.
void Decoder::mix(const ForwardArgs& args, const PackedLayer& layer, const std::vector<DeltaPlan>& plans) {
  const PackedModel& s = model_;
  const auto project = [&](const Weights* weights, Buffer& to) {
    linear({.weights = weights, .x = hidden_.data(), .norm = layer.input_norm, .eps = s.eps,
            .out = reserve(to, args.rows * weights->n), .rows = args.rows},
           s.is_f32);
  };
  project(layer.qkv, projected_);
  reserve(mixed_, args.rows * layer.o->k);
  if (layer.delta.rates == nullptr) return attend(args, layer);
  project(layer.delta.rates, rates_);
  apply_delta(args, layer, plans);
}

// Attention of q, k and v in `projected_`.
void Decoder::attend(const ForwardArgs& args, const PackedLayer& layer) {
  const PackedModel& s = model_;
  const auto kind = static_cast<size_t>(layer.kind);
  const AttentionKind& traits = s.kinds[kind];
  HeadNorm norm = layer.head_norm;
  if (traits.q_size > 0) {
    projection_sums_.resize(static_cast<size_t>(2 * args.rows));
    projection_sums(projected_.data(), args.rows, traits.heads, traits.kv_heads, traits.dim, traits.counted,
                    projection_sums_.data(), s.is_f32);
    if (s.group != nullptr) {
      s.group->all_reduce(projection_sums_.data(), 2 * args.rows, Element::kFloat32, s.timeout_s);
    }
    norm.q_size = static_cast<float>(traits.q_size), norm.k_size = static_cast<float>(traits.k_size);
  }
  const KVCache& cache = args.cache->kv[static_cast<size_t>(traits.cache)];
  const int64_t stride = layer.qkv->n, size = traits.heads * traits.dim, rope_bytes = traits.dim * size_;
  for (const SequenceRows& seq : args.sequence_rows) {
    const int64_t first = seq.first, region = cache.region(layer.cache_layer, seq.sequence);
    AttentionOptions options = traits.options;
    if (traits.q_size > 0) norm.sums = projection_sums_.data() + 2 * first;
    if (options.query_scale != nullptr) options.query_scale = query_scale_[kind].data() + first;
    attention({at(projected_.data(), first * stride * size_), at(cos_[kind].data(), first * rope_bytes),
               at(sin_[kind].data(), first * rope_bytes), args.slots + first, seq.mask,
               cache.keys + region, cache.values + region, at(mixed_.data(), first * size * size_), seq.rows,
               traits.heads, traits.kv_heads, cache.capacity, seq.length, seq.width, traits.dim, stride, options, norm,
               layer.sinks, layer.shares_kv},
              s.is_f32, s.stores_f32);
  }
  if (!traits.output_gate) return;
  const int64_t kv_heads = layer.shares_kv ? 0 : traits.kv_heads;
  const void* gates = at(projected_.data(), (traits.heads + 2 * kv_heads) * traits.dim * size_);
  multiply_sigmoid(gates, stride, args.rows, size, mixed_.data(), s.is_f32);
}

// The gated delta rule for the product in `projected_` and the rates in `rates_`.
void Decoder::apply_delta(const ForwardArgs& args, const PackedLayer& layer, const std::vector<DeltaPlan>& plans) {
  const PackedModel& s = model_;
  const DeltaWeights& weights = layer.delta;
  for (size_t i = 0; i < plans.size(); ++i) {
    const SequenceRows& seq = args.sequence_rows[i];
    gated_delta({.projected = at(projected_.data(), seq.first * layer.qkv->n * size_),
                 .rates = at(rates_.data(), seq.first * weights.rates->n * size_),
                 .shape = s.delta,
                 .slots = args.cache->delta->at(layer.cache_layer, seq.sequence),
                 .plan = &plans[i],
                 .conv = weights.conv,
                 .decay_factor = weights.decay_factor,
                 .decay_bias = weights.decay_bias,
                 .norm = weights.norm,
                 .eps = s.eps,
                 .out = at(mixed_.data(), seq.first * s.delta.v_size() * size_)},
                s.is_f32);
  }
}

// hidden_ += multiplier norm(x W^T), where the product is summed over the ranks of a group. `norm` may be null.
void Decoder::add_linear(const Weights& weights, const void* x, int64_t rows, const float* norm, float multiplier) {
  const PackedModel& s = model_;
  void* hidden = hidden_.data();
  if (s.group == nullptr && norm == nullptr) {
    linear({.weights = &weights, .x = x, .residual = hidden, .out = hidden, .rows = rows, .scale = multiplier},
           s.is_f32);
    return;
  }
  linear({.weights = &weights, .x = x, .out = reserve(product_, rows * s.hidden), .rows = rows}, s.is_f32);
  add_product(rows, norm, multiplier);
}

// hidden_ += multiplier norm(product_), where the product is summed over the ranks of a group. `norm` may be null.
void Decoder::add_product(int64_t rows, const float* norm, float multiplier) {
  const PackedModel& s = model_;
  const int64_t count = rows * s.hidden;
  void *hidden = hidden_.data(), *product = product_.data();
  if (s.group != nullptr) {
    s.group->all_reduce(product, count, s.is_f32 ? Element::kFloat32 : Element::kBfloat16, s.timeout_s);
  }
  if (norm == nullptr && multiplier == 1.0f) return add(product, count, hidden, s.is_f32);
  norm_add(product, rows, s.hidden, norm, s.eps, multiplier, hidden, s.is_f32);
}

// Adds the output of a layer's MLP to hidden_.
void Decoder::add_mlp(const PackedLayer& layer, int64_t rows) {
  const PackedModel& s = model_;
  const Mlp& mlp = layer.mlp;
  if (mlp.router != nullptr) {
    mixture({.mlp = mlp, .x = hidden_.data(), .norm = layer.mlp_norm, .eps = s.eps,
             .out = reserve(product_, rows * s.hidden), .rows = rows},
            s.is_f32);
    return add_product(rows, layer.mlp_output_norm, layer.residual_multiplier);
  }
  linear({.weights = mlp.gate_up, .x = hidden_.data(), .norm = layer.mlp_norm, .eps = s.eps,
          .out = reserve(projected_, rows * mlp.gate_up->n / 2), .gate = mlp.gate, .rows = rows},
         s.is_f32);
  add_linear(*mlp.down, projected_.data(), rows, layer.mlp_output_norm, layer.residual_multiplier);
}

// Adds the per-layer embeddings of a layer to hidden_. They are whole on every rank, so nothing is summed over a group.
void Decoder::add_per_layer(int64_t layer, int64_t rows) {
  const PackedModel& s = model_;
  const PerLayerPart& part = layers_[static_cast<size_t>(layer)].per_layer;
  if (part.gate == nullptr) return;
  const int64_t size = s.per_layer.size;
  void *gates = reserve(projected_, rows * size), *hidden = hidden_.data();
  linear({.weights = part.gate, .x = hidden, .out = gates, .rows = rows}, s.is_f32);
  apply_gates(at(per_layer_.data(), layer * size * size_), layers() * size, rows, size, part.activation, gates,
              s.is_f32);
  linear({.weights = part.projection, .x = gates, .out = reserve(product_, rows * s.hidden), .rows = rows}, s.is_f32);
  norm_add(product_.data(), rows, s.hidden, part.norm, s.eps, 1.0f, hidden, s.is_f32);
}

// Copies hidden_ to `hidden_states_` if the hidden states of this layer are wanted.
void Decoder::keep_hidden(int64_t layer, int64_t rows) {
  const auto found = std::find(hidden_layers_.begin(), hidden_layers_.end(), layer);
  if (found == hidden_layers_.end()) return;
  const int64_t bytes = model_.hidden * size_;
  void* states = reserve(hidden_states_, rows * num_hidden_layers() * model_.hidden);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t index = row * num_hidden_layers() + (found - hidden_layers_.begin());
    std::memcpy(at(states, index * bytes), at(hidden_.data(), row * bytes), static_cast<size_t>(bytes));
  }
}

void Decoder::forward(const ForwardArgs& args) {
  const PackedModel& s = model_;
  const int64_t rows = args.rows;
  hidden_rows_ = 0;
  gather(args);
  embed_per_layer(args);
  const std::vector<DeltaPlan> plans = plan_deltas(args);
  const size_t count = args.logits == nullptr && hidden_layers_.empty() ? writing_layers_ : layers_.size();
  for (size_t i = 0; i < count; ++i) {
    const PackedLayer& layer = layers_[i];
    mix(args, layer, plans);
    add_linear(*layer.o, mixed_.data(), rows, layer.mixer_output_norm, layer.residual_multiplier);
    add_mlp(layer, rows);
    add_per_layer(static_cast<int64_t>(i), rows);
    if (layer.output_scale != 1.0f) multiply(hidden_.data(), rows * s.hidden, layer.output_scale, s.is_f32);
    keep_hidden(static_cast<int64_t>(i), rows);
  }
  if (!hidden_layers_.empty()) hidden_rows_ = rows;
  if (args.logits == nullptr) return;
  const void* last = at(hidden_.data(), args.logits_from * s.hidden * size_);
  int64_t with_logits = rows - args.logits_from;
  if (args.logit_rows != nullptr) {
    with_logits = static_cast<int64_t>(args.logit_rows->size());
    void* chosen = reserve(projected_, with_logits * s.hidden);
    gather_rows(hidden_.data(), args.logit_rows->data(), with_logits, s.hidden * size_, chosen);
    last = chosen;
  }
  linear({.weights = s.head, .x = last, .norm = s.norm, .eps = s.eps, .logits = args.logits,
          .rows = with_logits, .scale = s.logit_multiplier, .softcap = s.logit_softcap},
         s.is_f32);
}

}  // namespace swiftspec::host
