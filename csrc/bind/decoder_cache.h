// Check of the caches that a decoder runs on.
#pragma once

#include "bind/cache.h"
#include "host/decoder/decoder.h"

namespace swiftspec::binding {

// Checks that a cache belongs to the model.
inline void check_cache(const host::Decoder& decoder, const ModelCache& cache) {
  const host::PackedModel& model = decoder.model();
  check(cache.type == model_type(model.stores_f32) && cache.kv.size() == decoder.kv_layers().size(),
        "the cache does not fit the model");
  for (const host::AttentionKind& kind : model.kinds) {
    const auto at = static_cast<size_t>(kind.cache);
    const host::KVCache& kv = cache.kv[at];
    check(kv.layers == decoder.kv_layers()[at] && kv.kv_heads == kind.kv_heads && kv.head_dim == kind.dim,
          "the cache does not fit the model");
  }
  const int64_t deltas = decoder.delta_layers();
  check((deltas > 0) == (cache.delta != nullptr), "the delta cache is missing, or the model has no delta layers");
  check(deltas == 0 || (cache.delta->layers == deltas && cache.delta->shape == model.delta &&
                        cache.delta->input_bytes == (model.is_f32 ? 4 : 2)),
        "the delta cache does not fit the model");
}

}  // namespace swiftspec::binding
