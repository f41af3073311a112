// Check of the caches that a decoder runs on.
#pragma once

#include "bind/cache.h"
#include "host/decoder/decoder.h"

namespace swiftspec::binding {

// Checks that a cache belongs to the model.
inline void check_cache(const host::Decoder& decoder, const Cache& cache) {
  const host::PackedModel& model = decoder.model();
  check(cache.type == model_type(model.is_f32) && cache.layers == decoder.attention_layers() &&
            cache.kv_heads == model.kv_heads && cache.head_dim == model.dim,
        "the cache does not fit the model");
  const int64_t deltas = decoder.layers() - decoder.attention_layers();
  check((deltas > 0) == (cache.delta != nullptr), "the delta cache is missing, or the model has no delta layers");
  check(deltas == 0 || (cache.delta->layers == deltas && cache.delta->shape == model.delta &&
                        cache.delta->input_bytes == (model.is_f32 ? 4 : 2)),
        "the delta cache does not fit the model");
}

}  // namespace swiftspec::binding
