#include "host/decoder/sampled_children.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "common/noise.h"

namespace swiftspec::host {

namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();
constexpr double kWeightUnits = 1e6;  // WEIGHT_DIGITS in swiftspec/tree/sampled_children.py

// q [width]: softmax of the log-probabilities, the largest of which is the first; all zero if it is not finite.
void write_probs(const float* log_probs, int64_t width, float* probs) {
  std::vector<double> mass(static_cast<size_t>(width));
  if (std::isfinite(log_probs[0])) {
    std::transform(log_probs, log_probs + width, mass.begin(), [&](float x) {
      return std::exp(static_cast<double>(x) - static_cast<double>(log_probs[0]));
    });
  }
  const double whole = std::accumulate(mass.begin(), mass.end(), 0.0);
  std::transform(mass.begin(), mass.end(), probs, [&](double x) { return x > 0.0 ? static_cast<float>(x / whole) : 0.0f; });
}

// Columns of q in the order drawn: by log q + Gumbel noise in float64. Those without probability come last.
std::vector<int64_t> draw_order(const float* probs, int64_t width, uint32_t key) {
  std::vector<double> scores(static_cast<size_t>(width), kNegInf);
  for (int64_t column = 0; column < width; ++column) {
    if (probs[column] <= 0.0f) continue;
    const uint32_t bits = noise::bits(key, static_cast<uint32_t>(column));
    const double minus_v = std::max((static_cast<double>(bits) + 0.5) * -0x1p-32, 0x1p-24 - 1.0);
    const double noise = -std::log(-std::log1p(minus_v));
    scores[static_cast<size_t>(column)] = std::log(static_cast<double>(probs[column])) + noise;
  }
  std::vector<int64_t> order(static_cast<size_t>(width));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  return order;
}

}  // namespace

void SampledChildren::draw(int64_t leaf, int64_t slot, const int64_t* tokens_of, const float* log_probs, int64_t count,
                           int64_t* drawn, double* weights) const {
  float* q = probs + slot * width;
  std::copy_n(tokens_of, width, tokens + slot * width);
  write_probs(log_probs, width, q);
  const std::vector<int64_t> order = draw_order(q, width, noise::mix(key ^ static_cast<uint32_t>(leaves + leaf)));
  // sums over each token and all later ones: of q, and of q to the power 1 + exponent
  std::vector<double> left(order.size() + 1), powered(order.size() + 1);
  for (size_t i = order.size(); i-- > 0;) {
    const double mass = q[order[i]];
    left[i] = left[i + 1] + mass;
    powered[i] = powered[i + 1] + (mass > 0.0 ? std::pow(mass, 1.0 + exponent) : 0.0);
  }
  double failed = 0.0, least = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t column = order[at];
    drawn[i] = tokens_of[column];
    double weight = kNegInf;
    if (q[column] > 0.0f) {
      const double passes = std::min(powered[at] / std::pow(left[at], 1.0 + exponent), 1.0);
      weight = std::log(passes) + failed;
      failed += std::log1p(-passes);
    }
    least = std::min(least, weight);
    weights[i] = std::rint(least * kWeightUnits) / kWeightUnits;
  }
}

}  // namespace swiftspec::host
