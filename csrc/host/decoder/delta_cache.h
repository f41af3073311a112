// Delta cache of a model: states of its delta layers. swiftspec/cache/delta.py documents and owns it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels_host.h"

namespace swiftspec::host {

// All buffers begin with [layers, sequences]; DeltaSlots has the rest of their shapes. Index i of the slots of a
// sequence is slot `folded[sequence] + i` of the KV cache.
struct DeltaCache {
  DeltaShape shape;
  float *state, *keys, *updates, *decays;
  uint8_t* inputs;
  int64_t input_bytes;    // of one element of `inputs`
  const int64_t* folded;  // [sequences]
  int64_t layers, sequences, slots;

  DeltaSlots at(int64_t layer, int64_t sequence) const;

  // Moves slots source[i] of the KV cache to start + i in every layer, as MoveArgs does.
  void move(int64_t sequence, const std::vector<int64_t>& source, int64_t start) const;
};

}  // namespace swiftspec::host
