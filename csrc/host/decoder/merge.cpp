#include "host/decoder/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels_host.h"

namespace swiftspec::host {

void TopKMerger::operator()(int64_t first, int64_t rows, int64_t k, int64_t* tokens, float* values,
                            const float* totals) {
  const int64_t ranks = group_.size(), each = totals == nullptr ? k : k + 1;  // k candidates, then the total
  own_.resize(static_cast<size_t>(rows * each));
  all_.resize(own_.size() * static_cast<size_t>(ranks));
  row_.resize(static_cast<size_t>(ranks * k));
  for (int64_t row = 0; row < rows; ++row) {
    Candidate* out = own_.data() + row * each;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t token = tokens[row * k + i];  // -1 (no finite score) is not a column
      out[i] = {values[row * k + i], static_cast<int32_t>(token < 0 ? token : first + token)};
    }
    if (totals != nullptr) out[k] = {totals[row], 0};
  }
  group_.all_gather(own_.data(), rows * each * static_cast<int64_t>(sizeof(Candidate)), all_.data(), seconds_);

  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.value != b.value ? a.value > b.value : a.token < b.token;
  };
  for (int64_t row = 0; row < rows; ++row) {
    const auto of_rank = [&](int64_t rank) { return all_.data() + (rank * rows + row) * each; };
    for (int64_t rank = 0; rank < ranks; ++rank) std::copy_n(of_rank(rank), k, row_.data() + rank * k);
    std::partial_sort(row_.begin(), row_.begin() + k, row_.end(), better);
    float total = 0.0f;
    if (totals != nullptr) {
      float top = -std::numeric_limits<float>::infinity();
      for (int64_t rank = 0; rank < ranks; ++rank) top = std::max(top, of_rank(rank)[k].value);
      for (int64_t rank = 0; rank < ranks; ++rank) total += std::exp(of_rank(rank)[k].value - top);
      total = top + std::log(total);
    }
    for (int64_t i = 0; i < k; ++i) {
      const Candidate& best = row_[static_cast<size_t>(i)];
      tokens[row * k + i] = best.token;
      values[row * k + i] = totals == nullptr ? best.value : log_probability(best.value, total);
    }
  }
}

}  // namespace swiftspec::host
