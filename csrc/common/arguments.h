// The arguments of operators that take the same ones on the CPU and on a GPU.
#pragma once

#include <cstdint>

namespace swiftspec {

// Inputs of the scores ((logits + bias) / temperature + noise) / tau of a vocabulary. Terms whose pointer is null are
// left out; tau applies only if there is noise.
struct ScoreArgs {
  const float* logits;           // [rows, stride]; only the first `vocab` columns are used
  const float* bias;             // [vocab], or null
  const float* noise;            // [*, vocab], or null
  const int64_t* rows_of_noise;  // [rows], the row of `noise` that belongs to each row
  float temperature, tau;
  int64_t rows, vocab, stride;
  // On a GPU: temperature, tau and the factor of the noise, 0 or 1, in device memory; they replace the fields above, so
  // that a CUDA graph serves requests with other values. Or null.
  const double* scalars = nullptr;
  // On a GPU, if not 0: `scalars` [sets, 3] and `bias` [sets, vocab] hold a set for each `rows_per_set` rows. Only for
  // cuda::draw_keyed.
  int64_t rows_per_set = 0;
};

// Move of KV slots: slot source[i] goes to start + i. `source` is ascending and source[i] >= start + i. Sizes are in
// bytes, so that any element type works.
struct MoveArgs {
  uint8_t* region;       // layer 0 of one sequence: [kv_heads, capacity, slot_bytes]
  int64_t layer_stride;  // bytes from one layer to the next
  int64_t layers, kv_heads, capacity, slot_bytes;
  const int64_t* source;  // [count]
  int64_t count, start;
};

}  // namespace swiftspec
