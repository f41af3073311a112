// Runs every native CPU operator at the given ISA levels on buffers of exactly the documented sizes, for a build with
// sanitizers (test_sanitized.py). Results must not depend on the number of threads. Prints a hash of each result. Exits
// with 0, or prints the difference.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "host/decoder/fast_reply.h"
#include "host/decoder/rounds.h"
#include "kernels_host.h"

using namespace swiftspec::host;
using swiftspec::ScoreArgs;

namespace {

std::mt19937 dice(7);
int repetitions = 3;  // of each operator, with several threads

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s at level %s\n", what, level());
  std::exit(1);
}

// Random values of the model's type as bytes: float32, or bfloat16 (the upper halves of float32).
std::vector<uint8_t> numbers(int64_t count, bool is_f32) {
  std::normal_distribution<float> normal;
  std::vector<uint8_t> out(static_cast<size_t>(count * (is_f32 ? 4 : 2)));
  for (int64_t i = 0; i < count; ++i) {
    const float x = normal(dice);
    is_f32 ? std::memcpy(out.data() + 4 * i, &x, 4)
         : std::memcpy(out.data() + 2 * i, reinterpret_cast<const char*>(&x) + 2, 2);
  }
  return out;
}

const float* floats(const std::vector<uint8_t>& bytes) {
  return reinterpret_cast<const float*>(bytes.data());
}

struct Linear {
  bool is_f32, swiglu, normed;
  int64_t rows, k, n;
  std::vector<uint8_t> x, norm, data, scales, zeros, bias, residual;
  Weights weights;

  Linear(Format format, bool is_f32_, bool swiglu_, int64_t rows_, int64_t k_, int64_t n_, int64_t group,
         int int8_activations = 0)
      : is_f32(is_f32_), swiglu(swiglu_), normed(rows_ % 2 == 0), rows(rows_), k(k_), n(n_) {
    const int64_t padded = (k + 7) / 8 * 8, blocks = (n + 15) / 16;
    x = numbers(rows * k, is_f32), norm = numbers(k, true), residual = numbers(rows * n, is_f32),
    bias = numbers(n, true);
    const bool four_bits = format == Format::int4 || format == Format::float4;
    const int64_t codes = four_bits ? 8 : format == Format::int8 ? 4 : 1;  // codes per 32 bits
    data = numbers(blocks * 16 * padded / codes, format != Format::bf16);
    if (codes > 1) scales = numbers(blocks * 16 * (k / group), true);
    if (format == Format::float4) {
      scales.resize(static_cast<size_t>(blocks * 16 * (k / group)));
      for (uint8_t& exponent : scales) exponent = static_cast<uint8_t>(120 + dice() % 8);
    }
    if (format == Format::int4) {
      zeros.resize(static_cast<size_t>(blocks * 16 * (k / group)));
      for (uint8_t& zero : zeros) zero = dice() % 16;
    }
    using swiftspec::host::ScaleType;
    weights = {format, data.data(), codes > 1 ? scales.data() : nullptr,
               format == Format::float4 ? ScaleType::exponent : ScaleType::f32,
               format == Format::int4 ? zeros.data() : nullptr, nullptr, nullptr, nullptr, nullptr, floats(bias), k, n, codes > 1 ? group : 0, int8_activations};
  }

  std::vector<uint8_t> run() const {
    std::vector<uint8_t> out(static_cast<size_t>(rows * (swiglu ? n / 2 : n) * (is_f32 ? 4 : 2)));
    linear({&weights, x.data(), normed ? floats(norm) : nullptr, 1e-5f, swiglu ? nullptr : residual.data(),
            out.data(), nullptr, swiglu ? Gate::silu : Gate::none, rows},
           is_f32);
    return out;
  }
};

// A mixture of experts, of which each row has three, with a shared expert.
struct ExpertLayer {
  static constexpr int64_t kExperts = 6, kHidden = 64, kInner = 96, kShared = 40;
  bool is_f32;
  int64_t rows;
  Linear router, gate_up, down, shared_gate_up, shared_down;
  std::vector<uint8_t> correction = numbers(kExperts, true);

  ExpertLayer(Format format, bool is_f32_, int64_t rows_, int int8_activations)
      : is_f32(is_f32_),
        rows(rows_),
        router(is_f32 ? Format::f32 : Format::bf16, is_f32, false, rows, kHidden, kExperts + 1, 0),
        gate_up(format, is_f32, true, rows, kHidden, kExperts * 2 * kInner, 32, int8_activations),
        down(format, is_f32, false, 1, kInner, kExperts * kHidden, 32, int8_activations),
        shared_gate_up(router.weights.format, is_f32, false, 1, kHidden, 2 * kShared, 0),
        shared_down(router.weights.format, is_f32, false, 1, kShared, kHidden, 0) {}

  std::vector<uint8_t> run() const {
    std::vector<uint8_t> out(static_cast<size_t>(rows * kHidden * (is_f32 ? 4 : 2)));
    const Gate gate = gate_up.weights.format == Format::float4 ? Gate::clamped_swiglu : Gate::silu;
    Mlp mlp{&gate_up.weights, &down.weights, gate, &router.weights, 3, rows % 2 == 0, &shared_gate_up.weights,
            &shared_down.weights};
    if (rows % 3 == 0) mlp.correction = floats(correction), mlp.groups = 2, mlp.groups_per_token = 1;
    mixture({mlp, gate_up.x.data(), gate_up.normed ? floats(gate_up.norm) : nullptr, 1e-5f, out.data(), rows}, is_f32);
    return out;
  }
};

struct Attention {
  bool is_f32;
  int64_t rows, heads, kv_heads, length, width, dim;
  std::vector<uint8_t> qkv, cos, sin, keys, values, mask, norm, query_scale, sinks;
  std::vector<int64_t> slots;
  AttentionOptions options;
  HeadNorm head_norm;

  Attention(bool is_f32_, int64_t rows_, int64_t heads_, int64_t kv_heads_, int64_t length_, int64_t width_,
            int64_t dim_)
      : is_f32(is_f32_),
        rows(rows_),
        heads(heads_),
        kv_heads(kv_heads_),
        length(length_),
        width(width_),
        dim(dim_) {
    qkv = numbers(rows * (heads + 2 * kv_heads) * dim, is_f32);
    cos = numbers(rows * dim, is_f32), sin = numbers(rows * dim, is_f32);
    keys = numbers(kv_heads * length * dim, is_f32), values = numbers(kv_heads * length * dim, is_f32);
    mask.resize(static_cast<size_t>(rows * width));
    for (uint8_t& seen : mask) seen = dice() % 3 != 0;
    for (int64_t r = 0; r < rows; ++r) {
      slots.push_back(length - rows + r);
      if (width >= rows) mask[static_cast<size_t>(r * width + width - rows + r)] = 1;
    }
  }

  // With every option, and a sliding window of this many positions.
  Attention& with_options(int64_t window) {
    norm = numbers((heads + 2 * kv_heads) * dim, true), query_scale = numbers(rows, true);
    sinks = numbers(heads, true);
    options = {window, 0.3f, 20.0f, floats(query_scale), rows % 2 == 0};
    head_norm = {floats(norm), true, 1e-5f};
    return *this;
  }

  std::vector<uint8_t> run() {
    std::vector<uint8_t> out(static_cast<size_t>(rows * heads * dim * (is_f32 ? 4 : 2)));
    attention({qkv.data(), cos.data(), sin.data(), slots.data(), mask.data(), keys.data(), values.data(),
               out.data(), rows, heads, kv_heads, length, length, width, dim, (heads + 2 * kv_heads) * dim, options,
               head_norm, sinks.empty() ? nullptr : floats(sinks)},
              is_f32, is_f32);
    return out;
  }
};

// The delta layer of a chunk or of a tree, after `folded` slots that are not in the buffers.
struct Delta {
  static constexpr DeltaShape kShape{2, 4, 16, 32, 4};
  bool is_f32;
  int64_t rows, length;
  std::vector<uint8_t> projected, rates, conv, factors, biases, norm, states, keys, updates, decays, inputs, mask;
  std::vector<int64_t> slots;
  static constexpr int64_t kFolded = 64;

  Delta(bool is_f32_, int64_t rows_, int64_t length_, bool chunk) : is_f32(is_f32_), rows(rows_), length(length_) {
    const int64_t used = length - kFolded;
    projected = numbers(rows * (kShape.conv_size() + kShape.v_size()), is_f32);
    rates = numbers(rows * 2 * kShape.v_heads, is_f32);
    conv = numbers(kShape.conv_width * kShape.conv_size(), true), norm = numbers(kShape.v_dim, true);
    factors = numbers(kShape.v_heads, true), biases = numbers(kShape.v_heads, true);
    states = numbers(kShape.v_heads * kShape.k_dim * kShape.v_dim, true);
    keys = numbers(used * kShape.k_heads * kShape.k_dim, true), updates = numbers(used * kShape.v_size(), true);
    decays = numbers(used * kShape.v_heads, true), inputs = numbers(used * kShape.conv_size(), is_f32);
    for (std::vector<uint8_t>* each : {&factors, &decays}) {  // at most 0: sets the signs
      for (size_t i = 3; i < each->size(); i += 4) (*each)[i] |= 0x80;
    }
    mask.resize(static_cast<size_t>(rows * rows));
    for (int64_t r = 0; r < rows; ++r) {
      slots.push_back(length - rows + r);
      for (int64_t i = 0; i <= r; ++i) mask[static_cast<size_t>(r * rows + i)] = i == r || chunk || dice() % 2 == 0;
    }
  }

  std::vector<uint8_t> run() {
    std::vector<uint8_t> out(static_cast<size_t>(rows * kShape.v_size() * (is_f32 ? 4 : 2)));
    std::vector<uint8_t> state = states, k = keys, u = updates, g = decays, x = inputs;  // the same in every run
    const DeltaPlan plan = plan_delta(slots.data(), mask.data(), rows, rows, length, kFolded);
    const auto as_floats = [](std::vector<uint8_t>& bytes) { return reinterpret_cast<float*>(bytes.data()); };
    const DeltaSlots cache{as_floats(state), as_floats(k), as_floats(u), as_floats(g), x.data()};
    gated_delta({projected.data(), rates.data(), kShape, cache, &plan, floats(conv), floats(factors), floats(biases),
                 floats(norm), 1e-6f, out.data()},
                is_f32);
    fold_delta(kShape, cache);
    out.insert(out.end(), state.begin(), state.end());
    return out;
  }
};

// A model with random weights: two attention layers of different shapes, of which the second one has a mixture of
// experts, a delta layer, and a layer that shares the keys of the first one; per-layer embeddings; and its caches.
struct Model {
  static constexpr DeltaShape kDelta{1, 2, 16, 16, 3};
  static constexpr int64_t kHidden = 48, kHeads = 4, kVocab = 50, kSlots = 120;
  static constexpr int64_t kKvHeads[] = {2, 1}, kDims[] = {16, 48};  // of the attention layers
  static constexpr int64_t kWidth = 48, kExperts = 3, kLayers = 4, kPerLayer = 24;
  static constexpr float kFactors[] = {-0.1f, -2.0f};
  bool is_f32;
  std::vector<uint8_t> embedding, table, cos, sin, norm, head_norm, conv;
  std::array<std::vector<uint8_t>, 2> keys, values;  // of the attention layers
  // qkv, o, gate_up, down of the first three layers; rates, router; queries of the last layer; of per-layer embeddings
  // gate and projection in a layer, and the projection of all; head
  std::vector<Linear> weights;

  explicit Model(bool is_f32_) : is_f32(is_f32_) {
    table = numbers(kVocab * kLayers * kPerLayer, is_f32);
    embedding = numbers(kVocab * kHidden, is_f32), norm = numbers(kHidden, true);
    head_norm = numbers((kHeads + kKvHeads[1]) * kDims[1], true);
    cos = numbers(kSlots * kDims[1], is_f32), sin = numbers(kSlots * kDims[1], is_f32);
    for (size_t i : {0, 1}) {
      keys[i] = numbers(kKvHeads[i] * kSlots * kDims[i], is_f32);
      values[i] = numbers(kKvHeads[i] * kSlots * kDims[i], is_f32);
    }
    const Format format = is_f32 ? Format::f32 : Format::bf16;
    const auto add = [&](int64_t k, int64_t n) { weights.emplace_back(format, is_f32, false, 1, k, n, 0); };
    for (size_t i : {0, 1}) {
      const int64_t experts = i == 0 ? 1 : kExperts;
      add(kHidden, (kHeads + 2 * kKvHeads[i]) * kDims[i]), add(kHeads * kDims[i], kHidden);
      add(kHidden, experts * 2 * kWidth), add(kWidth, experts * kHidden);
    }
    add(kHidden, kDelta.conv_size() + kDelta.v_size()), add(kDelta.v_size(), kHidden);
    add(kHidden, 2 * kWidth), add(kWidth, kHidden);
    add(kHidden, 2 * kDelta.v_heads), add(kHidden, kExperts);
    add(kHidden, kHeads * kDims[0]), add(kHidden, kPerLayer), add(kPerLayer, kHidden);
    add(kHidden, kLayers * kPerLayer), add(kHidden, kVocab);
    conv = numbers(kDelta.conv_width * kDelta.conv_size(), true);
  }

  Decoder decoder() const {
    std::vector<PackedLayer> layers;
    const PerLayerPart per_layer{&weights[15].weights, &weights[16].weights, floats(norm), Gate::gelu_tanh};
    for (size_t i = 0; i < 8; i += 4) {
      // the first layer has no option, the second one has all
      const bool all = i > 0;
      layers.push_back({floats(norm), &weights[i].weights, &weights[i + 1].weights, floats(norm),
                        {&weights[i + 2].weights, &weights[i + 3].weights, all ? Gate::gelu_tanh : Gate::silu,
                         all ? &weights[13].weights : nullptr, all ? 2 : 0, all},
                        all, all ? HeadNorm{floats(head_norm), false, 1e-5f} : HeadNorm{}, all ? floats(norm) : nullptr,
                        all ? floats(norm) : nullptr, all ? 0.7f : 1.0f, all ? 0.9f : 1.0f, nullptr, 0, {}, per_layer});
    }
    layers.push_back({floats(norm), &weights[8].weights, &weights[9].weights, floats(norm),
                      {&weights[10].weights, &weights[11].weights, Gate::silu}, 0, {}, nullptr, nullptr, 1.0f, 1.0f, nullptr, 0,
                      {&weights[12].weights, floats(conv), kFactors, kFactors, floats(norm)}, per_layer});
    layers.push_back({floats(norm), &weights[14].weights, &weights[1].weights, floats(norm),
                      {&weights[2].weights, &weights[3].weights, Gate::silu}, 0, {}, nullptr, nullptr, 1.0f, 1.0f, nullptr,
                      0, {}, per_layer, true});
    const std::vector<AttentionKind> kinds = {
        {kHeads, kKvHeads[0], kDims[0], 0, cos.data(), sin.data(), {}},
        {kHeads, kKvHeads[1], kDims[1], 1, sin.data(), cos.data(), {7, 0.3f, 20.0f}}};
    return {{is_f32, is_f32, 1e-5f, kHidden, kVocab, kSlots, embedding.data(), 1.5f, kinds,
             floats(norm), &weights.back().weights, 0.8f, 30.0f, nullptr, 0.0, kDelta,
             {kPerLayer, table.data(), 2.0f, &weights[17].weights, floats(norm), 1e-4f}},
            layers,
            {1}};
  }

  // Several rounds: expands a tree with pending tokens, verifies a proposal on the same model, re-roots the tree.
  std::vector<int64_t> run() {
    constexpr int64_t kNodes = 1 + 24 * 5, kTree = 24;
    std::vector<int64_t> token(kNodes), parent(kNodes), slot(kNodes), sizes(2), trace;
    std::vector<double> logprob(kNodes);
    std::vector<uint8_t> visible((kTree + 1) * kTree);
    Tree tree{token.data(), parent.data(), slot.data(), logprob.data(), visible.data(), sizes.data(), kNodes, kTree};
    Decoder own_decoder = decoder();
    auto k = keys, v = values;  // every run starts with the same cache
    std::vector<float> state(kDelta.v_heads * kDelta.k_dim * kDelta.v_dim, 0.1f),
        k_slots(kSlots * kDelta.k_heads * kDelta.k_dim, 0.2f), updates(kSlots * kDelta.v_size(), 0.3f),
        decays(kSlots * kDelta.v_heads, -0.4f);
    std::vector<uint8_t> inputs(kSlots * kDelta.conv_size() * (is_f32 ? 4 : 2));
    const int64_t folded = 0;
    const DeltaCache delta{kDelta, state.data(), k_slots.data(), updates.data(), decays.data(), inputs.data(),
                           is_f32 ? 4 : 2, &folded, 1, 1, kSlots};
    ModelCache caches{{}, &delta};
    for (size_t i : {0, 1}) {
      caches.kv.push_back({k[i].data(), v[i].data(), 1, 1, kKvHeads[i], kSlots, kDims[i], is_f32 ? 4 : 2});
    }
    Rounds rounds(own_decoder, caches);
    Scoring scoring(rounds.columns(kVocab), 0.9f, nullptr, true, 7, 0);
    constexpr int64_t kBytes = (kVocab + 7) / 8;
    const std::vector<uint8_t> bits(6 * kBytes, 0xb5);  // token masks of every other round
    const TokenMaskFn after = [&](const Nodes&) { return TokenMask{bits.data(), kBytes}; };
    int64_t prefix = 30;
    tree.reset(5);
    Nodes pending = {3, 4}, path, surviving, sampled;
    for (int round = 0; round < 4; ++round) {
      for (int step = 0; step < 3; ++step) {
        std::vector<Expansion> expansions{{&tree, 0, prefix, pending, 4, 5, &scoring, round % 2 == 0, 0.7,
                                           round % 2 == 0 ? TokenMaskFn{} : after}};
        rounds.expand(expansions);
        prefix += static_cast<int64_t>(pending.size());
        pending.clear();
      }
      const auto [nodes, tokens, parents, weights] = tree.best_subtree(6, 0);
      const TokenMask allowed = round % 2 == 0 ? TokenMask{} : after(nodes);
      // after the draft's slots
      std::vector<Verification> verifications{{tokens, parents, 0, prefix + kTree, &scoring, allowed}};
      rounds.verify(verifications);
      path = verifications[0].path;
      sampled = verifications[0].sampled;
      trace.insert(trace.end(), sampled.begin(), sampled.end());
      require(own_decoder.hidden_rows() == static_cast<int64_t>(tokens.size()), "hidden states of other rows");
      const auto* hidden = static_cast<const uint8_t*>(own_decoder.hidden_states());
      trace.insert(trace.end(), hidden, hidden + own_decoder.hidden_rows() * kHidden * (is_f32 ? 4 : 2));
      Words result{1, round, 30, static_cast<int32_t>(path.size())};
      result.insert(result.end(), path.begin(), path.end());
      result.insert(result.end(), sampled.begin(), sampled.end());
      const Words replied = fast_reply({tree, 1, 30, 6, 4, 3, 0.1}, result);
      trace.insert(trace.end(), replied.begin(), replied.end());
      const Nodes walked = tree.walk(sampled);
      if (walked.empty()) {
        pending = {token[0]};
        tree.reset(sampled.back());
      } else {
        tree.reroot(walked.back(), path, surviving);
      }
    }
    return trace;
  }
};

// Prints a hash of results (FNV-1a), which other CPUs must reproduce (test_aarch64.py).
template <class T>
void print_hash(const char* what, const std::vector<T>& results) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = reinterpret_cast<const uint8_t*>(results.data());
  for (size_t i = 0; i < results.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  std::printf("%s %016llx\n", what, static_cast<unsigned long long>(hash));
}

template <class Case>
void check(Case& one, const char* what) {
  set_threads(1);
  const auto alone = one.run();
  print_hash(what, alone);
  set_threads(3);
  for (int i = 0; i < repetitions; ++i) require(one.run() == alone, what);
}

void check_scores(int64_t rows, int64_t vocab) {
  const auto logits = numbers(rows * (vocab + 3), true), bias = numbers(vocab, true);
  std::vector<int32_t> positions = {0, 5};
  std::vector<float> noise(static_cast<size_t>(2 * vocab)), values(static_cast<size_t>(rows));
  gumbel_rows(9, 1, positions.data(), 2, 0, vocab, noise.data());
  std::vector<int64_t> which(static_cast<size_t>(rows)), drawn(which), tokens(which);
  for (int64_t& row : which) row = dice() % 2;
  const ScoreArgs args{floats(logits), floats(bias), noise.data(), which.data(), 0.8f,
                       1.0f,           rows,         vocab,        vocab + 3};
  draw(args, drawn.data(), nullptr);
  children(args, 1, tokens.data(), values.data(), nullptr);
  require(drawn == tokens, "the token drawn is not the likeliest child");
  print_hash("noise", noise), print_hash("log-probabilities", values);
  std::vector<uint32_t> bits(static_cast<size_t>(vocab), 0xffffffffu);
  std::vector<float> out(bits.size());
  gumbel(bits.data(), vocab, out.data());
  require(std::isfinite(out.back()), "noise is not finite");
}

void check_level() {
  for (const bool is_f32 : {false, true}) {
    for (const int64_t rows : {1, 2, 7, 9, 40}) {
      Linear dense(is_f32 ? Format::f32 : Format::bf16, is_f32, false, rows, 37, 131, 0);
      Linear gated(Format::int4, is_f32, true, rows, 128, 150, 64);
      Linear large(Format::int4, is_f32, false, rows, 256, 272, 128);
      check(dense, "linear"), check(gated, "swiglu"), check(large, "int4");
      Linear rounded(Format::int4, is_f32, true, rows, 128, 150, 64, true);
      Linear bytes(Format::int8, is_f32, false, rows, 256, 272, 128, true);
      check(rounded, "int4, rows in int8"), check(bytes, "int8");
      ExpertLayer experts(Format::int4, is_f32, rows, false), rounded_experts(Format::int8, is_f32, rows, true);
      ExpertLayer float4(Format::float4, is_f32, rows, false), rounded_float4(Format::float4, is_f32, rows, true);
      check(float4, "experts in float4"), check(rounded_float4, "experts in float4, rows in int8");
      check(experts, "a mixture of experts"), check(rounded_experts, "a mixture of experts, rows in int8");
      Attention tree(is_f32, rows, 6, 2, 70 + rows, 64, 48), all_seen(is_f32, rows, 5, 1, 40 + rows, 0, 32);
      Attention chunk(is_f32, rows, 8, 4, 200, std::max<int64_t>(rows, 3), 64), wide(is_f32, rows, 2, 1, 150, 0, 512);
      check(tree, "attention"), check(all_seen, "attention without a mask"),
          check(chunk, "attention of a chunk"), check(wide, "attention with the largest heads");
      Delta delta_chunk(is_f32, rows, 64 + 50 + rows, true), delta_tree(is_f32, rows, 64 + 40 + rows, false);
      check(delta_chunk, "a delta layer of a chunk"), check(delta_tree, "a delta layer of a tree");
      check(tree.with_options(9), "attention with a short window"),
          check(chunk.with_options(50), "attention of a chunk with a window"),
          check(wide.with_options(30), "attention with the largest heads and a window");
    }
  }
  for (const int64_t vocab : {1, 15, 16, 300}) check_scores(5, vocab);
  for (const bool is_f32 : {false, true}) {
    Model model(is_f32);
    check(model, "rounds");
  }
}

// Concurrent jobs of two callers, with pauses in which the workers fall asleep.
void check_callers() {
  set_threads(3);
  const auto call = [](int seed) {
    std::mt19937 mine(static_cast<unsigned>(seed));
    static Linear shared(Format::bf16, false, false, 40, 128, 128, 0);
    static const auto expected = shared.run();
    for (int i = 0; i < 70 * repetitions; ++i) {
      require(shared.run() == expected, "a job of two callers");
      if (mine() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mine() % 400));
    }
  };
  std::thread other(call, 1);
  call(2);
  other.join();
}

}  // namespace

// Arguments: names of ISA levels, or "once" for a single repetition of what follows. Prints the level that is selected
// without a name first.
int main(int count, char** names) {
  std::printf("%s\n", level());
  for (int i = 1; i < count; ++i) {
    if (std::string(names[i]) == "once") repetitions = 1;
    if (use_level(names[i])) check_level();
  }
  if (std::string(level()) != "none") check_callers();
  std::vector<uint8_t> region(2 * 3 * 8 * 4);
  const std::vector<int64_t> source = {2, 5, 7};
  move_kv({region.data(), 3 * 8 * 4, 2, 3, 8, 4, source.data(), 3, 1});
  return 0;
}
