// The KV cache of a model, on the CPU or on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "bind/arguments.h"
#include "host/decoder/delta_cache.h"

namespace swiftspec::binding {

// Keys and values [layers, sequences, kv_heads, capacity, head_dim] of one type, and the states of delta layers.
struct Cache {
  uint8_t *keys, *values;
  Type type;
  int64_t layers, sequences, kv_heads, capacity, head_dim;
  const host::DeltaCache* delta = nullptr;  // null: the model has no delta layers

  Cache(Device device, const Array& k, const Array& v)
      : type(k.type()),
        layers(k.size(0)),
        sequences(k.size(1)),
        kv_heads(k.size(2)),
        capacity(k.size(3)),
        head_dim(k.size(4)) {
    keys = static_cast<uint8_t*>(k.at(type, device, "k", {kAny, kAny, kAny, kAny, kAny}));
    values = static_cast<uint8_t*>(v.at(type, device, "v", {layers, sequences, kv_heads, capacity, head_dim}));
  }

  int64_t slot_bytes() const { return head_dim * (type.bits / 8); }
  int64_t region_bytes() const { return kv_heads * capacity * slot_bytes(); }  // of one sequence in one layer
  int64_t layer_bytes() const { return sequences * region_bytes(); }
  int64_t offset(int64_t layer, int64_t sequence) const {
    check(layer >= 0 && layer < layers && sequence >= 0 && sequence < sequences, "a region that the cache lacks");
    return layer * layer_bytes() + sequence * region_bytes();
  }
};

// Checks that slots source[i] can be moved to start + i in place; see MoveArgs.
inline void check_moves(const std::vector<int64_t>& source, int64_t start, int64_t capacity) {
  const auto count = static_cast<int64_t>(source.size());
  check(start >= 0 && start + count <= capacity, "the slots do not fit the region");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = source[static_cast<size_t>(i)];
    check(from >= start + i && from < capacity, "a source lies before its destination or outside the region");
    check(i == 0 || from > source[static_cast<size_t>(i - 1)], "sources must ascend");
  }
}

}  // namespace swiftspec::binding
