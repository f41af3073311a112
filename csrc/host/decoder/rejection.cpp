#include "host/decoder/rejection.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/noise.h"

namespace swiftspec::host {

namespace {

constexpr double kResidualShare = 1e-30;  // RESIDUAL_SHARE in swiftspec/tree/rejection.py

double sum(const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

void normalise(std::vector<double>& q) {
  const double whole = std::max(sum(q), kResidualShare);
  for (double& x : q) x /= whole;
}

double uniform(uint32_t bits) { return (static_cast<double>(bits) + 0.5) * 0x1p-32; }

}  // namespace

SiblingVerdict verify_siblings(std::vector<double>& p, std::vector<double>& q, const std::vector<int64_t>& columns,
                               uint32_t key) {
  SiblingVerdict verdict;
  for (size_t j = 0; j < p.size(); ++j) p[j] = q[j] > 0.0 ? p[j] : 0.0;
  double out = std::max(1.0 - sum(p), 0.0);
  normalise(q);
  for (size_t j = 0; j < p.size(); ++j) verdict.overlap += std::min(p[j], q[j]);
  for (size_t i = 0; i < columns.size(); ++i) {
    const auto own = static_cast<size_t>(columns[i]);
    if (i > 0) normalise(q);
    if (uniform(noise::bits(key, static_cast<uint32_t>(i))) * q[own] < p[own]) {
      verdict.accepted = static_cast<int64_t>(i);
      return verdict;
    }
    for (size_t j = 0; j < p.size(); ++j) p[j] = std::max(p[j] - q[j], 0.0) + kResidualShare * p[j];
    const double whole = sum(p) + out;
    for (double& x : p) x /= whole;
    out /= whole;
    verdict.outside -= std::log(whole);
    q[own] = 0.0;
  }
  return verdict;
}

}  // namespace swiftspec::host
