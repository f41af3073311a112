// Options of layers, as Python passes them.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "bind/arguments.h"
#include "bind/array.h"
#include "kernels_host.h"

namespace swiftspec::binding {

inline host::Gate gate_of(const std::string& name) {
  check(name == "none" || name == "silu" || name == "gelu_tanh", "gate must be none, silu or gelu_tanh");
  return name == "none" ? host::Gate::none : name == "silu" ? host::Gate::silu : host::Gate::gelu_tanh;
}

// `query_scale`: [count] float32.
inline host::AttentionOptions attention_options(std::optional<int64_t> window, std::optional<float> scale,
                                                std::optional<float> softcap, const MaybeArray& query_scale,
                                                int64_t count) {
  check(!window || *window >= 1, "a sliding window must be at least 1");
  check(!scale || (std::isfinite(*scale) && *scale > 0.0f), "the scale of scores must be above 0");
  check(!softcap || (std::isfinite(*softcap) && *softcap > 0.0f), "a soft cap must be above 0");
  return {window.value_or(0), scale.value_or(0.0f), softcap.value_or(0.0f),
          at_or_null<float>(query_scale, kCpu, "query_scale", {count})};
}

// `weight`: [heads + kv_heads, dim] float32, or [heads + 2 kv_heads, dim].
inline host::HeadNorm head_norm(const MaybeArray& weight, float eps, int64_t heads, int64_t kv_heads, int64_t dim) {
  if (!weight) return {};
  const bool values = weight->size(0) == heads + 2 * kv_heads;
  host::HeadNorm norm;
  norm.weight = weight->at<float>(kCpu, "qk_norm", {heads + (values ? 2 : 1) * kv_heads, dim});
  norm.values = values, norm.eps = eps;
  return norm;
}

}  // namespace swiftspec::binding
