// The best tokens of a vocabulary whose columns the ranks of a group hold, from each rank's own best.
#pragma once

#include <cstdint>
#include <vector>

#include "host/shm/ll_shm.h"

namespace swiftspec::host {

// All ranks make the same calls and come to the same result. Its buffers grow to the largest call.
class Merge {
 public:
  Merge(Group& group, double seconds) : group_(group), seconds_(seconds) {}

  // In place, `tokens` and `values` [rows, k]: from the highest scores of this rank's columns, highest first, whose
  // tokens are counted from its `first`, to those of all columns; of equal scores the lower token stands first. With
  // `totals` [rows], what `children` has of these columns, the values become log-probabilities.
  void operator()(int64_t first, int64_t rows, int64_t k, int64_t* tokens, float* values, const float* totals);

 private:
  struct Candidate {
    float value;
    int32_t token;
  };

  Group& group_;
  double seconds_;
  std::vector<Candidate> own_, all_, row_;
};

}  // namespace swiftspec::host
