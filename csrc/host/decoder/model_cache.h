// Caches of a model: the KV caches of its attention layers, and the delta cache. Python owns the buffers
// (swiftspec/cache).
#pragma once

#include <cstdint>
#include <vector>

#include "host/decoder/delta_cache.h"

namespace swiftspec::host {

// Keys and values [layers, sequences, kv_heads, capacity, head_dim] of the layers with this shape.
struct KVCache {
  uint8_t *keys, *values;
  int64_t layers, sequences, kv_heads, capacity, head_dim, element_bytes;

  int64_t slot_bytes() const { return head_dim * element_bytes; }
  int64_t region_bytes() const { return kv_heads * capacity * slot_bytes(); }  // of one sequence in one layer
  int64_t layer_bytes() const { return sequences * region_bytes(); }
  int64_t region(int64_t layer, int64_t sequence) const { return layer * layer_bytes() + sequence * region_bytes(); }

  // Moves slots source[i] of a sequence to start + i in every layer, as MoveArgs does.
  void move(int64_t sequence, const std::vector<int64_t>& source, int64_t start) const;
};

// All caches have the same sequences, and all KV caches the same capacity.
struct ModelCache {
  std::vector<KVCache> kv;            // one for each shape of the attention layers
  const DeltaCache* delta = nullptr;  // null: the model has no delta layers

  int64_t sequences() const { return kv[0].sequences; }
  int64_t capacity() const { return kv[0].capacity; }

  void move(int64_t sequence, const std::vector<int64_t>& source, int64_t start) const;
};

}  // namespace swiftspec::host
