// The arguments of operators that take the same ones on the CPU and on a GPU.
#pragma once

#include <cstdint>

namespace swiftspec {

// The scores of a vocabulary: ((logits + bias) / temperature + noise) / tau, without the bias, the noise or tau where
// there is none.
struct ScoreArgs {
  const float* logits;           // [rows, stride], of which the first `vocab` columns count
  const float* bias;             // [vocab], or null
  const float* noise;            // [*, vocab], or null
  const int64_t* rows_of_noise;  // [rows], which row of the noise
  float temperature, tau;        // tau only with noise
  int64_t rows, vocab, stride;
};

// Slot source[i] -> start + i, where source ascends and source[i] >= start + i. Any dtype: sizes are in bytes.
struct MoveArgs {
  uint8_t* region;       // layer 0 of one sequence: [kv_heads, capacity, slot_bytes]
  int64_t layer_stride;  // bytes from one layer to the next
  int64_t layers, kv_heads, capacity, slot_bytes;
  const int64_t* source;  // [count]
  int64_t count, start;
};

}  // namespace swiftspec
