#include "host/decoder/delta_cache.h"

namespace swiftspec::host {

DeltaSlots DeltaCache::at(int64_t layer, int64_t sequence) const {
  const int64_t region = layer * sequences + sequence, first = region * slots;
  return {state + region * shape.v_heads * shape.k_dim * shape.v_dim, keys + first * shape.k_heads * shape.k_dim,
          updates + first * shape.v_size(), decays + first * shape.v_heads,
          inputs + first * shape.conv_size() * input_bytes};
}

void DeltaCache::move(int64_t sequence, const std::vector<int64_t>& source, int64_t start) const {
  std::vector<int64_t> from;
  for (const int64_t slot : source) from.push_back(slot - folded[sequence]);
  const auto move_slots = [&](void* buffer, int64_t slot_bytes) {
    const int64_t region = slots * slot_bytes;
    move_kv({static_cast<uint8_t*>(buffer) + sequence * region, sequences * region, layers, 1, slots, slot_bytes,
             from.data(), static_cast<int64_t>(from.size()), start - folded[sequence]});
  };
  constexpr int64_t kFloatBytes = sizeof(float);
  move_slots(keys, shape.k_heads * shape.k_dim * kFloatBytes);
  move_slots(updates, shape.v_size() * kFloatBytes);
  move_slots(decays, shape.v_heads * kFloatBytes);
  move_slots(inputs, shape.conv_size() * input_bytes);
}

}  // namespace swiftspec::host
