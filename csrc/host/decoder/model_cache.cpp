#include "host/decoder/model_cache.h"

namespace swiftspec::host {

void KVCache::move(int64_t sequence, const std::vector<int64_t>& source, int64_t start) const {
  for (uint8_t* buffer : {keys, values}) {
    move_kv({buffer + region(0, sequence), layer_bytes(), layers, kv_heads, capacity, slot_bytes(), source.data(),
             static_cast<int64_t>(source.size()), start});
  }
}

void ModelCache::move(int64_t sequence, const std::vector<int64_t>& source, int64_t start) const {
  for (const KVCache& cache : kv) cache.move(sequence, source, start);
  if (delta != nullptr) delta->move(sequence, source, start);
}

}  // namespace swiftspec::host
