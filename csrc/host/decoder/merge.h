// Merges the best tokens of vocabulary shards: top k over the ranks of a group, from the top k of each rank.
#pragma once

#include <cstdint>
#include <vector>

#include "host/shm/ll_shm.h"

namespace swiftspec::host {

// All ranks make the same calls and get the same result. Buffers grow to the largest call. `seconds`: timeout per call.
class TopKMerger {
 public:
  TopKMerger(ShmGroup& group, double seconds) : group_(group), seconds_(seconds) {}

  // In place: `tokens` and `values` [rows, k] hold the highest scores of this rank's columns, highest first, with
  // tokens counted from its `first` column. They become the highest scores of all columns; of equal scores the lower
  // token comes first. With `totals` [rows], the logsumexp of this rank's columns, values become log-probabilities.
  void operator()(int64_t first, int64_t rows, int64_t k, int64_t* tokens, float* values, const float* totals);

 private:
  struct Candidate {
    float value;
    int32_t token;
  };

  ShmGroup& group_;
  double seconds_;
  std::vector<Candidate> own_, all_, row_;
};

}  // namespace swiftspec::host
