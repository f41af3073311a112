// Decoder forward as one call.
#include "host/decoder/decoder.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/attention_options.h"
#include "bind/cache.h"
#include "bind/decoder_cache.h"
#include "bind/delta_cache.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

using host::Weights;
// rates, convolution, factor and bias of the decay, norm
using DeltaArgs = std::tuple<const Weights*, Array, Array, Array, Array>;
// of per-layer embeddings in a layer: gate, projection, norm, activation
using PerLayerPartArgs = std::tuple<const Weights*, const Weights*, Array, std::string>;
// table, multiplier, projection, norm, epsilon of the norm
using PerLayerArgs = std::tuple<Array, float, const Weights*, Array, float>;
// input norm, qkv, o, norm before the MLP, MLP, kind of attention, norm of heads, norms of the outputs of mixer and MLP,
// residual multiplier, scale of the output, attention sinks, layer of the cache, weights of a delta layer, per-layer
// embeddings
using LayerArgs = std::tuple<MaybeArray, const Weights*, const Weights*, MaybeArray, MlpArgs, int64_t, MaybeArray,
                             MaybeArray, MaybeArray, float, float, MaybeArray, int64_t, std::optional<DeltaArgs>,
                             std::optional<PerLayerPartArgs>>;
// cos, sin, options, sizes of the projections that a norm covers or zeros, key heads that count, whether the output has a
// gate, heads, KV heads, index of the KV cache
using KindArgs = std::tuple<Array, Array, OptionArgs, int64_t, int64_t, MaybeArray, bool, int64_t, int64_t, int64_t>;
// k_heads, v_heads, k_dim, v_dim, conv_width
using DeltaShapeArgs = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
using Copies = std::list<std::vector<uint8_t>>;

host::DeltaWeights delta_of(const DeltaArgs& args, const host::PackedModel& s) {
  const auto& [rates, conv, factor, bias, norm] = args;
  const host::DeltaShape& shape = s.delta;
  check(has_shape(rates, 2 * shape.v_heads, s.hidden, s.is_f32), "the rates of a delta layer do not fit its heads");
  return {rates, conv.at<float>(kCpu, "conv", {shape.conv_width, shape.conv_size()}),
          factor.at<float>(kCpu, "decay_factor", {shape.v_heads}), bias.at<float>(kCpu, "decay_bias", {shape.v_heads}),
          norm.at<float>(kCpu, "norm", {shape.v_dim})};
}

host::PerLayerEmbeddings per_layer_of(const PerLayerArgs& args, int64_t layers, int64_t vocab, int64_t hidden,
                                      bool is_f32, bool stores_f32) {
  const auto& [table, multiplier, projection, norm, eps] = args;
  const int64_t size = norm.size(0), width = layers * size;
  check(size >= 1 && has_shape(projection, width, hidden, is_f32), "the per-layer embeddings do not fit the layers");
  return {size, table.at(model_type(stores_f32), kCpu, "table", {vocab, width}), multiplier, projection,
          norm.at<float>(kCpu, "norm", {size}), eps};
}

host::PerLayerPart per_layer_part_of(const PerLayerPartArgs& args, const host::PackedModel& s) {
  const auto& [gate, projection, norm, activation] = args;
  const int64_t size = s.per_layer.size;
  check(size > 0 && has_shape(gate, size, s.hidden, s.is_f32) && has_shape(projection, s.hidden, size, s.is_f32),
        "the per-layer embeddings do not fit a layer");
  const host::Gate kind = gate_of(activation);
  check(kind != host::Gate::none, "per-layer embeddings need an activation");
  return {gate, projection, norm.at<float>(kCpu, "norm", {s.hidden}), kind};
}

// Outputs of `qkv` and inputs of `o`.
std::pair<int64_t, int64_t> mixer_sizes(const host::PackedModel& s, const host::AttentionKind& kind, bool is_delta,
                                        bool shares_kv) {
  if (is_delta) {
    check(s.delta.k_heads > 0, "a delta layer in a model without delta layers");
    return {s.delta.conv_size() + s.delta.v_size(), s.delta.v_size()};
  }
  const int64_t gates = kind.output_gate ? kind.heads : 0, kv_heads = shares_kv ? 0 : kind.kv_heads;
  return {(kind.heads + 2 * kv_heads + gates) * kind.dim, kind.heads * kind.dim};
}

// Whether a layer has the projection of queries only, with an output gate if its kind has one.
bool has_queries_only(const Weights* qkv, const host::AttentionKind& kind) {
  return qkv != nullptr && qkv->n == kind.heads * kind.dim * (kind.output_gate ? 2 : 1);
}

host::PackedLayer layer_of(const LayerArgs& args, const host::PackedModel& s) {
  const auto& [input_norm, qkv, o, mlp_norm, mlp, kind, qk_norm, mixer_output_norm, mlp_output_norm,
               residual_multiplier, output_scale, sinks, cache_layer, delta, per_layer] = args;
  check(kind >= 0 && kind < static_cast<int64_t>(s.kinds.size()), "a layer's kind of attention is unknown");
  const host::AttentionKind& traits = s.kinds[static_cast<size_t>(kind)];
  const bool shares_kv = !delta && has_queries_only(qkv, traits);
  const auto [projected, mixed] = mixer_sizes(s, traits, delta.has_value(), shares_kv);
  check(!shares_kv || traits.q_size == 0, "a layer that shares keys cannot norm whole projections");
  check(has_shape(qkv, projected, s.hidden, s.is_f32) && has_shape(o, s.hidden, mixed, s.is_f32),
        "a layer's projections do not fit each other");
  const auto norm = [&](const MaybeArray& weight, const char* name) {
    return at_or_null<float>(weight, kCpu, name, {s.hidden});
  };
  return {norm(input_norm, "input_norm"),
          qkv,
          o,
          norm(mlp_norm, "mlp_norm"),
          mlp_of(mlp, s.hidden, s.is_f32),
          kind,
          head_norm(qk_norm, s.eps, traits.heads, shares_kv ? 0 : traits.kv_heads, traits.dim),
          norm(mixer_output_norm, "mixer_output_norm"),
          norm(mlp_output_norm, "mlp_output_norm"),
          residual_multiplier,
          output_scale,
          at_or_null<float>(sinks, kCpu, "sinks", {traits.heads}),
          cache_layer,
          delta ? delta_of(*delta, s) : host::DeltaWeights{},
          per_layer ? per_layer_part_of(*per_layer, s) : host::PerLayerPart{},
          shares_kv};
}

// Checks that the layers of each cache count up from 0, and that a layer that shares keys and values follows theirs.
void check_cache_layers(const host::PackedModel& s, const std::vector<host::PackedLayer>& layers) {
  std::vector<int64_t> next(s.kinds.size() + 1);  // the last one: of the delta cache
  for (const host::PackedLayer& layer : layers) {
    const bool is_delta = layer.delta.rates != nullptr;
    const auto cache = is_delta ? s.kinds.size() : static_cast<size_t>(s.kinds[static_cast<size_t>(layer.kind)].cache);
    if (layer.shares_kv) {
      check(layer.cache_layer >= 0 && layer.cache_layer < next[cache], "a layer shares keys of a later one");
      continue;
    }
    check(layer.cache_layer == next[cache]++, "the layers of a cache are not in order");
  }
}

host::AttentionKind kind_of(const KindArgs& args, Type type, int64_t positions) {
  const auto& [cos, sin, options, q_size, k_size, counted, output_gate, heads, kv_heads, cache] = args;
  const bool norm_after_rope = std::get<4>(options);
  const int64_t dim = cos.size(1);
  check(kv_heads >= 1 && heads >= kv_heads && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  check_head_dim(dim);
  check(q_size >= 0 && (q_size > 0) == (k_size > 0), "the sizes of both projections must be given");
  check(q_size == 0 || !norm_after_rope, "a norm of whole projections must come before RoPE");
  check(q_size == 0 || !output_gate, "a norm of whole projections and an output gate cannot be combined");
  return {heads,
          kv_heads,
          dim,
          cache,
          cos.at(type, kCpu, "cos", {positions, dim}),
          sin.at(type, kCpu, "sin", {positions, dim}),
          attention_options(options, positions),
          q_size,
          k_size,
          at_or_null<bool>(counted, kCpu, "counted", {kv_heads}),
          output_gate};
}

// The kinds of attention. Those with the same cache must have the same shape.
std::vector<host::AttentionKind> kinds_of(const std::vector<KindArgs>& args, Type type, int64_t positions) {
  std::vector<host::AttentionKind> kinds;
  std::vector<const host::AttentionKind*> caches;  // the first kind with each cache
  kinds.reserve(args.size());
  for (const KindArgs& each : args) {
    const host::AttentionKind& kind = kinds.emplace_back(kind_of(each, type, positions));
    const auto count = static_cast<int64_t>(caches.size());
    check(kind.cache >= 0 && kind.cache <= count, "the KV caches are not in order");
    if (kind.cache == count) caches.push_back(&kind);
    const host::AttentionKind& first = *caches[static_cast<size_t>(kind.cache)];
    check(kind.kv_heads == first.kv_heads && kind.dim == first.dim, "two kinds with one KV cache differ in shape");
  }
  return kinds;
}

std::unique_ptr<host::Decoder> make_decoder(const Array& embedding, float embedding_multiplier,
                                            const std::vector<KindArgs>& kinds, const Array& norm, float eps,
                                            const Weights& head, float logit_multiplier,
                                            std::optional<float> logit_softcap, const std::vector<LayerArgs>& layers,
                                            std::optional<host::ShmGroup*> group, double timeout_s,
                                            std::vector<int64_t> hidden_layers,
                                            const std::optional<DeltaShapeArgs>& delta,
                                            const std::optional<PerLayerArgs>& per_layer) {
  check(!kinds.empty(), "a model needs a kind of attention");
  const bool is_f32 = std::get<0>(kinds[0]).type() == kFloat32, stores_f32 = embedding.type() == kFloat32;
  const Type type = model_type(is_f32);
  check(is_f32 || !stores_f32, "float32 embeddings need a float32 residual stream");
  const int64_t vocab = embedding.size(0), hidden = embedding.size(1), positions = std::get<0>(kinds[0]).size(0);
  check(has_shape(&head, head.n, hidden, is_f32), "the head does not fit the hidden size");
  check(!logit_softcap || *logit_softcap > 0.0f, "a soft cap must be above 0");
  host::DeltaShape delta_shape{};
  if (delta) {
    delta_shape = std::make_from_tuple<host::DeltaShape>(*delta);
    check_shape(delta_shape);
  }
  const host::PackedModel model{is_f32,
                                stores_f32,
                                eps,
                                hidden,
                                vocab,
                                positions,
                                embedding.at(model_type(stores_f32), kCpu, "embedding", {kAny, kAny}),
                                embedding_multiplier,
                                kinds_of(kinds, type, positions),
                                norm.at<float>(kCpu, "norm", {hidden}),
                                &head,
                                logit_multiplier,
                                logit_softcap.value_or(0.0f),
                                group.value_or(nullptr),
                                timeout_s,
                                delta_shape,
                                per_layer ? per_layer_of(*per_layer, static_cast<int64_t>(layers.size()), vocab, hidden,
                                                         is_f32, stores_f32)
                                          : host::PerLayerEmbeddings{}};
  check_range(hidden_layers.data(), static_cast<int64_t>(hidden_layers.size()), static_cast<int64_t>(layers.size()),
              "a hidden layer is not a layer of the model");
  std::vector<host::PackedLayer> made;
  for (const LayerArgs& layer : layers) made.push_back(layer_of(layer, model));
  check_cache_layers(model, made);
  return std::make_unique<host::Decoder>(model, std::move(made), std::move(hidden_layers));
}

// The last `width` columns of some rows of a mask, copied if they are not contiguous.
const uint8_t* window(const Array& mask, int64_t first, int64_t rows, int64_t width, Copies& copies) {
  const auto* from = mask.data<const uint8_t>() + first * mask.stride(0);
  if (width == mask.size(1) && mask.contiguous()) return from;
  from += (mask.size(1) - width) * mask.stride(1);
  std::vector<uint8_t>& copy = copies.emplace_back(static_cast<size_t>(rows * width));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < width; ++i) {
      copy[static_cast<size_t>(row * width + i)] = from[row * mask.stride(0) + i * mask.stride(1)];
    }
  }
  return copy.data();
}

// Splits the batch into the rows of each sequence, which must be consecutive.
void add_sequences(host::ForwardArgs& args, const int64_t* sequence, const Array& kv_len, const Array& mask,
                   Copies& copies) {
  const int64_t sequences = args.cache->sequences();
  const auto* lengths = kv_len.at<int64_t>(kCpu, "kv_len", {sequences});
  for (int64_t first = 0, next = 0; first < args.rows; first = next) {
    const int64_t mine = sequence[first];
    check(first == 0 || mine > sequence[first - 1], "the rows of a sequence do not follow each other");
    while (next < args.rows && sequence[next] == mine) ++next;
    check(mine >= 0 && mine < sequences, "a region that the cache lacks");
    const int64_t rows = next - first, length = lengths[mine];
    check(length >= 1 && length <= args.cache->capacity(), "a sequence has more slots in use than its region");
    check_range(args.slots + first, rows, length, "a slot is not in use");
    const int64_t width = std::min(mask.size(1), length);
    args.sequence_rows.push_back({first, rows, window(mask, first, rows, width, copies), width, length, mine});
  }
}

void forward(host::Decoder& decoder, const Array& tokens, const Array& positions, const Array& slots,
             const Array& sequence, const Array& kv_len, const Array& mask, const ModelCache& cache,
             const MaybeArray& logits) {
  const host::PackedModel& model = decoder.model();
  const int64_t rows = size_arg("rows", tokens.size(0), 1);
  check_cache(decoder, cache);
  host::ForwardArgs args{tokens.at<int64_t>(kCpu, "tokens", {kAny}),
                         positions.at<int64_t>(kCpu, "positions", {rows}),
                         slots.at<int64_t>(kCpu, "slots", {rows}),
                         rows,
                         {},
                         &cache,
                         0,
                         at_or_null<float>(logits, kCpu, "logits", {rows, model.head->n})};
  check_range(args.tokens, rows, model.vocab, "a token lies outside the vocabulary");
  check_range(args.positions, rows, model.positions, "a position lies outside the context");
  check(mask.type() == kBool && mask.rank() == 2 && mask.size(0) == rows, "the mask must be bool [rows, width]");
  Copies copies;
  add_sequences(args, sequence.at<int64_t>(kCpu, "sequence", {rows}), kv_len, mask, copies);
  py::gil_scoped_release unlocked;
  decoder.forward(args);
}

void hidden_states(const host::Decoder& decoder, const Array& out) {
  const host::PackedModel& model = decoder.model();
  const int64_t rows = out.size(0), layers = decoder.num_hidden_layers();
  void* to = out.at(model_type(model.is_f32), kCpu, "out", {rows, layers, model.hidden});
  check(rows <= decoder.hidden_rows(), "the last forward has kept the hidden states of fewer rows");
  if (out.bytes() > 0) std::memcpy(to, decoder.hidden_states(), static_cast<size_t>(out.bytes()));
}

}  // namespace

void bind_decoder(py::module_& m) {
  py::class_<host::Decoder>(m, "Decoder",
                            "Decoder forward as one call; see PackedModel and ForwardArgs in host/decoder/decoder.h.")
      .def(py::init(&make_decoder), py::arg("embedding"), py::arg("embedding_multiplier"), py::arg("kinds"),
           py::arg("norm"), py::arg("eps"), py::arg("head"), py::arg("logit_multiplier"), py::arg("logit_softcap"),
           py::arg("layers"), py::arg("group"), py::arg("timeout_s"), py::arg("hidden_layers"), py::arg("delta"),
           py::arg("per_layer"), py::keep_alive<1, 2>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(),
           py::keep_alive<1, 7>(), py::keep_alive<1, 10>(), py::keep_alive<1, 11>(), py::keep_alive<1, 15>(),
           "The tables `cos` and `sin` have the type of the residual stream, which `embedding` has as well unless it is "
           "bfloat16. `kinds`: of attention, each cos, sin, options (as of `AttentionRows`, the scale of queries by "
           "position), sizes of the projections that a norm covers or zeros, key heads that count, whether the output has a gate, heads, KV heads, index of the KV cache. Each of `layers`: "
           "input norm, qkv, o, norm before the MLP, MLP, kind, norm of heads, norms of the outputs of attention and MLP, "
           "residual multiplier, scale of the output, attention sinks, layer of its cache, and of a delta layer its rates, "
           "convolution, factor and bias of the decay, and norm, otherwise None; the gate, projection, norm and "
           "activation of per-layer embeddings, or None. Each MLP: gate_up, down, gate, and of a "
           "mixture of experts its router, number of experts per token and norm_topk_prob, otherwise None, 0, False; "
           "gate_up and down of its shared expert, or None; of sigmoid scores the correction bias, groups, groups per "
           "token and multiplier, or None. `hidden_layers`: the layers whose hidden states each forward "
           "keeps. `delta`: k_heads, v_heads, k_dim, v_dim and conv_width of the delta layers, or None. `per_layer`: "
           "of per-layer embeddings the table, its multiplier, the projection, its norm and the epsilon of that, or "
           "None. Keeps all arguments alive.")
      .def("forward", &forward, py::arg("tokens"), py::arg("positions"), py::arg("slots"), py::arg("sequence"),
           py::arg("kv_len"), py::arg("mask"), py::arg("cache"), py::arg("logits"),
           "Runs a batch (model/batch.py) whose rows are sorted by sequence. Skips the LM head without `logits`.")
      .def("hidden_states", &hidden_states, py::arg("out"),
           "Copies the hidden states of the first rows of the last forward, that of a native round included, to `out` "
           "[rows, hidden_layers, hidden].");
}

}  // namespace swiftspec::binding
