// Options of layers, as Python passes them.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "bind/arguments.h"
#include "bind/array.h"
#include "kernels_host.h"

namespace swiftspec::binding {

inline host::Gate gate_of(const std::string& name) {
  if (name == "silu") return host::Gate::silu;
  if (name == "gelu_tanh") return host::Gate::gelu_tanh;
  if (name == "clamped_swiglu") return host::Gate::clamped_swiglu;
  check(name == "none", "gate must be none, silu, gelu_tanh or clamped_swiglu");
  return host::Gate::none;
}

inline bool has_shape(const host::Weights* weights, int64_t n, int64_t k, bool is_f32) {
  return weights != nullptr && weights->n == n && weights->k == k && (is_f32 || weights->format != host::Format::f32);
}

// Whether these are the projections of `experts` gated MLPs.
inline bool fit_each_other(const host::Weights* gate_up, const host::Weights* down, int64_t experts, int64_t hidden,
                           bool is_f32) {
  return gate_up != nullptr && experts >= 1 && gate_up->n % (2 * experts) == 0 &&
         has_shape(gate_up, gate_up->n, hidden, is_f32) &&
         has_shape(down, experts * hidden, gate_up->n / (2 * experts), is_f32);
}

using MaybeWeights = std::optional<const host::Weights*>;
// of sigmoid scores: correction bias, groups, groups per token, multiplier
using SigmoidArgs = std::tuple<Array, int64_t, int64_t, float>;
// gate_up, down, gate; of a mixture of experts its router, number of experts per token and norm_topk_prob; gate_up and
// down of its shared expert; how sigmoid scores choose experts
using MlpArgs = std::tuple<const host::Weights*, const host::Weights*, std::string, MaybeWeights, int64_t, bool,
                           MaybeWeights, MaybeWeights, std::optional<SigmoidArgs>>;

inline void use_sigmoid(host::Mlp& mlp, const SigmoidArgs& args) {
  const auto& [correction, groups, groups_per_token, multiplier] = args;
  const int64_t experts = mlp.experts();
  check(mlp.router != nullptr && groups >= 1 && experts % groups == 0, "groups must divide the experts of a mixture");
  check(groups_per_token >= 1 && groups_per_token <= groups, "a row needs at least one group, and at most all");
  check(groups_per_token * (experts / groups) >= mlp.experts_per_token, "the groups of a row have too few experts");
  check(groups == groups_per_token || experts / groups >= 2, "a group needs at least two experts");
  mlp.correction = correction.at<float>(kCpu, "correction", {experts});
  mlp.groups = groups, mlp.groups_per_token = groups_per_token, mlp.multiplier = multiplier;
}

inline host::Mlp mlp_of(const MlpArgs& args, int64_t hidden, bool is_f32) {
  const auto& [gate_up, down, gate, router, experts_per_token, norm_topk_prob, shared_gate_up, shared_down, sigmoid] =
      args;
  host::Mlp mlp{gate_up, down, gate_of(gate), router.value_or(nullptr), experts_per_token, norm_topk_prob,
                shared_gate_up.value_or(nullptr), shared_down.value_or(nullptr)};
  const int64_t experts = mlp.experts();
  check(mlp.gate != host::Gate::none, "an MLP has no gate");
  check(fit_each_other(gate_up, down, experts, hidden, is_f32), "the projections of an MLP do not fit each other");
  const bool shared = mlp.shared_gate_up != nullptr || mlp.shared_down != nullptr;
  check(!shared || (mlp.router != nullptr && fit_each_other(mlp.shared_gate_up, mlp.shared_down, 1, hidden, is_f32)),
        "the projections of a shared expert do not fit each other");
  if (mlp.router != nullptr) {
    check(has_shape(mlp.router, mlp.router->n, hidden, is_f32) && hidden % kBlock == 0 && down->k % kBlock == 0,
          "the sizes of experts must be multiples of 16");
    check(experts_per_token >= 1 && experts_per_token <= experts, "a row needs at least one expert, and at most all");
  }
  if (sigmoid) use_sigmoid(mlp, *sigmoid);
  return mlp;
}

inline void check_head_dim(int64_t dim) {
  check(dim % 16 == 0 && dim >= 16 && dim <= host::kMaxHeadDim, "head_dim must be a multiple of 16 up to 512");
}

// window, scale of scores, soft cap, scale of queries, whether the norm of heads comes after RoPE
using OptionArgs = std::tuple<std::optional<int64_t>, std::optional<float>, std::optional<float>, MaybeArray, bool>;

// The scale of queries has shape [count].
inline host::AttentionOptions attention_options(const OptionArgs& args, int64_t count) {
  const auto& [window, scale, softcap, query_scale, norm_after_rope] = args;
  check(!window || *window >= 1, "a sliding window must be at least 1");
  check(!scale || (std::isfinite(*scale) && *scale > 0.0f), "the scale of scores must be above 0");
  check(!softcap || (std::isfinite(*softcap) && *softcap > 0.0f), "a soft cap must be above 0");
  return {window.value_or(0), scale.value_or(0.0f), softcap.value_or(0.0f),
          at_or_null<float>(query_scale, kCpu, "query_scale", {count}), norm_after_rope};
}

// `weight`: [heads + kv_heads, dim] float32, or [heads + 2 kv_heads, dim]; or none. `kv_heads`: 0 if keys are shared.
inline host::HeadNorm head_norm(const MaybeArray& weight, float eps, int64_t heads, int64_t kv_heads, int64_t dim) {
  if (!weight) return {};
  const bool values = kv_heads > 0 && weight->size(0) == heads + 2 * kv_heads;
  host::HeadNorm norm;
  norm.weight = weight->at<float>(kCpu, "qk_norm", {heads + (values ? 2 : 1) * kv_heads, dim});
  norm.values = values, norm.eps = eps;
  return norm;
}

}  // namespace swiftspec::binding
