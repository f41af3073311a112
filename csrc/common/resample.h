// Weights of a group of particles: log-sum-exp, effective sample size and systematic resampling. The reference
// implementation is swiftspec/backends/reference/resampling.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"
#include "common/ieee.h"

namespace swiftspec::resample {

SWIFTSPEC_HD double max_weight(const double* weights, int64_t count) {
  double top = weights[0];
  for (int64_t i = 1; i < count; ++i) top = weights[i] > top ? weights[i] : top;
  return top;
}

SWIFTSPEC_HD double sum(const double* values, int64_t count) {
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total = ieee::add(total, values[i]);
  return total;
}

// log(sum of e^w); NaN if any weight is NaN.
SWIFTSPEC_HD double log_sum(const double* weights, int64_t count) {
  const double top = max_weight(weights, count);
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total = ieee::add(total, exp(weights[i] - top));
  return ieee::add(top, log(total));
}

// Effective sample size of normalised weights: 1 / (sum of their squares).
SWIFTSPEC_HD double effective_sample_size(const double* shares, int64_t count) {
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total = ieee::add(total, ieee::mul(shares[i], shares[i]));
  return 1.0 / total;
}

// Systematic resampling with one uniform number in (0, 1): row i becomes a copy of row source[i]. Surviving rows keep
// their place (source[i] = i) and the additional copies fill the vacant rows, both in order, so that rows can be copied
// in place.
SWIFTSPEC_HD void systematic_resampling(const double* shares, int64_t count, double uniform, int64_t* source) {
  const auto rows = static_cast<double>(count);
  for (int64_t i = 0; i < count; ++i) source[i] = 0;  // first the number of copies of row i
  double reached = shares[0];
  for (int64_t row = 0, of = 0; row < count; ++row) {
    const double edge = (static_cast<double>(row) + uniform) / rows;
    while (of < count - 1 && !(reached > edge)) reached += shares[++of];
    ++source[of];
  }
  // backwards, since a donor's count must be read before its row is overwritten: the last vacancy takes the last copy
  int64_t donor = count - 1, spare = source[donor] - 1;
  for (int64_t row = count - 1; row >= 0; --row) {
    if (source[row] > 0) continue;
    while (spare < 1) spare = source[--donor] - 1;
    --spare;
    source[row] = -1 - donor;
  }
  for (int64_t row = 0; row < count; ++row) source[row] = source[row] > 0 ? row : -1 - source[row];
}

}  // namespace swiftspec::resample
