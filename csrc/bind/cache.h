// The KV caches of a model, on the CPU or on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "bind/arguments.h"
#include "host/decoder/model_cache.h"

namespace swiftspec::binding {

// Keys and values of one type.
struct Cache : host::KVCache {
  Type type;

  Cache(Device device, const Array& k, const Array& v)
      : host::KVCache{nullptr,   nullptr,   k.size(0), k.size(1), k.size(2),
                      k.size(3), k.size(4), k.type().bits / 8},
        type(k.type()) {
    keys = static_cast<uint8_t*>(k.at(type, device, "k", {kAny, kAny, kAny, kAny, kAny}));
    values = static_cast<uint8_t*>(v.at(type, device, "v", {layers, sequences, kv_heads, capacity, head_dim}));
  }

  int64_t offset(int64_t layer, int64_t sequence) const {
    check(layer >= 0 && layer < layers && sequence >= 0 && sequence < sequences, "a region that the cache lacks");
    return region(layer, sequence);
  }
};

// The caches of a model, whose KV caches are of one type.
struct ModelCache : host::ModelCache {
  Type type;
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
