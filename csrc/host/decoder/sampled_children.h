// Children drawn from the draft's distribution without replacement; the reference is
// swiftspec/tree/sampled_children.py, which owns and documents the arrays.
#pragma once

#include <cstdint>

namespace swiftspec::host {

// State of the draws of one request. `key`: of the noise, from which the keys of expanded leaves follow. `leaves`:
// leaves that the request has expanded so far. `exponent`: of q in the weights.
struct SampledChildren {
  uint32_t key;
  int64_t leaves;
  double exponent;
  int64_t slots, width;  // tree slots; tokens that a distribution q covers
  int32_t* tokens;       // [slots, width]
  float* probs;          // [slots, width]

  // Draws `count` children of the leaf with this number and tree slot: their tokens and log-weights [count], in the
  // order drawn. `tokens_of`, `log_probs` [width]: the draft's most likely tokens and their log-probabilities.
  void draw(int64_t leaf, int64_t slot, const int64_t* tokens_of, const float* log_probs, int64_t count,
            int64_t* drawn, double* weights) const;
};

}  // namespace swiftspec::host
