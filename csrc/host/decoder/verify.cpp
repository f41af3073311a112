// Verification of a round's draft tokens; the references are swiftspec/batching/chains.py and
// swiftspec/smc/verification.py.
#include <algorithm>
#include <cmath>
#include <limits>

#include "host/decoder/population.h"
#include "kernels_host.h"

namespace swiftspec::host {

// log p of the draft tokens under the target, in `values_` [K, N].
void Population::log_probs_of_drafts(const Span& span, int64_t group) {
  const Particles& p = particles_;
  const int64_t rows = p.steps * p.count;
  sampled_.resize(static_cast<size_t>(rows));
  values_.resize(sampled_.size());
  for (int64_t row = 0; row < rows; ++row) {
    sampled_[static_cast<size_t>(row)] = drafts(group)[row % p.count * p.steps + row / p.count];
  }
  log_probs(scores(span, target_logits(group), rows, true), sampled_.data(), values_.data());
}

void Population::weigh_drafts(const Span& span, int64_t group) {
  const Particles& p = particles_;
  const int64_t n = p.count, steps = p.steps;
  log_probs_of_drafts(span, group);
  const float* log_q = log_q_.data() + group * n * steps;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t step = 0; step < steps; ++step) {
      const float log_p = static_cast<float>(power_) * values_[static_cast<size_t>(step * n + i)];
      verdict_.terms[static_cast<size_t>(i * (steps + 1) + step)] =
          static_cast<double>(log_p) - static_cast<double>(log_q[i * steps + step]);
    }
  }
  const float* last = target_logits(group) + steps * n * target_.decoder.model().head->n;
  keys_.clear();
  for (int64_t i = 0; i < n; ++i) keys_.push_back(p.key(group, Particles::kBonus, i, steps));
  draw_keyed(scores(span, last, n, true, power_), keys_.data(), verdict_.bonus.data(), nullptr);
  if (power_ == 1.0) return;
  values_.resize(static_cast<size_t>(3 * n));
  sampled_.resize(static_cast<size_t>(n));
  float *best = values_.data(), *log_total = best + n, *powered = log_total + n;
  children(scores(span, last, n, true), 1, sampled_.data(), best, log_total);
  children(scores(span, last, n, true, power_), 1, sampled_.data(), best, powered);
  for (int64_t i = 0; i < n; ++i) {
    const float term = powered[i] - static_cast<float>(power_) * log_total[i];
    verdict_.terms[static_cast<size_t>(i * (steps + 1) + steps)] = term;
  }
}

// Accepts draft tokens as long as they equal the draws of autoregressive decoding.
void Population::verify_coupled(const Span& span, int64_t group) {
  const Particles& p = particles_;
  const int64_t rows = p.slots_per_round();
  keys_.clear();
  for (int64_t row = 0; row < rows; ++row) keys_.push_back(target_key(group, row % p.count, row / p.count));
  sampled_.resize(static_cast<size_t>(rows));
  draw_rows(scores(span, target_logits(group), rows, true), span, nullptr);
  for (int64_t i = 0; i < p.count; ++i) {
    const int64_t* mine = drafts(group) + i * p.steps;
    int64_t accepted = 0;
    while (accepted < p.steps && sampled_[static_cast<size_t>(accepted * p.count + i)] == mine[accepted]) ++accepted;
    verdict_.num_accepted[static_cast<size_t>(i)] = accepted;
    verdict_.bonus[static_cast<size_t>(i)] = sampled_[static_cast<size_t>(accepted * p.count + i)];
  }
}

// Rejection sampling. Source: Leviathan et al. 2023, algorithm 1.
void Population::verify_rejection(const Span& span, int64_t group) {
  const Particles& p = particles_;
  log_probs_of_drafts(span, group);
  for (int64_t i = 0; i < p.count; ++i) {
    const float* log_q = log_q_.data() + (group * p.count + i) * p.steps;
    int64_t accepted = 0;
    for (; accepted < p.steps; ++accepted) {
      const float log_p = values_[static_cast<size_t>(accepted * p.count + i)];
      const float coin = std::log(static_cast<float>(p.uniform(group, i, accepted)));
      if (!(coin < log_p - log_q[accepted] && log_p > -std::numeric_limits<float>::infinity())) break;
    }
    verdict_.num_accepted[static_cast<size_t>(i)] = accepted;
    verdict_.bonus[static_cast<size_t>(i)] = residual(span, group, i, accepted);
  }
}

// The token after `accepted` draft tokens: drawn from norm(max(0, p - q)), or from p if all were accepted, the
// difference vanishes by rounding, or q is not finite. -1 if p is not finite.
int64_t Population::residual(const Span& span, int64_t group, int64_t row, int64_t accepted) {
  const Particles& p = particles_;
  const int64_t stride = draft_.decoder.model().head->n;
  const float* logits = target_logits(group) + (accepted * p.count + row) * target_.decoder.model().head->n;
  const ScoreArgs target = scores(span, logits, 1, true);
  const uint32_t key = p.key(group, Particles::kBonus, row, p.steps);
  int64_t token = -1;
  if (accepted < p.steps) {
    const float* drafted = draft_logits_[static_cast<size_t>(accepted)].data() + (group * p.count + row) * stride;
    token = draw_residual(target, scores(span, drafted, 1, false), key);
  }
  if (token < 0) draw_keyed(target, &key, &token, nullptr);
  return token;
}

}  // namespace swiftspec::host
