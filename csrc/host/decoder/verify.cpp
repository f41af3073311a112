// Verification of a round's draft tokens; the reference is swiftspec/smc/verification.py.
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
  const int64_t stride = target_.decoder.model().head->n;
  const float* last = target_logits(group) + steps * n * stride;
  keys_.clear();
  for (int64_t i = 0; i < n; ++i) keys_.push_back(p.key(group, Particles::kBonus, i, steps));
  draw_keyed(scores(span, last, n, true, power_), keys_.data(), verdict_.bonus.data(), nullptr);
  for (int64_t i = 0; i < n; ++i) {
    verdict_.terms[static_cast<size_t>(i * (steps + 1) + steps)] = log_normaliser(span, last + i * stride);
  }
}

// As `weigh_drafts` for a target with filters: a draft token outside them is rejected, and the token drawn in its place
// ends the round.
void Population::weigh_kept_drafts(const Span& span, int64_t group) {
  const Particles& p = particles_;
  const int64_t n = p.count, steps = p.steps, stride = target_.decoder.model().head->n;
  log_probs_of_drafts(span, group);  // -inf outside the filters
  const std::vector<float> log_p = values_;
  const float* log_q = log_q_.data() + group * n * steps;
  for (int64_t i = 0; i < n; ++i) {
    double* terms = verdict_.terms.data() + i * (steps + 1);
    int64_t accepted = steps;
    for (int64_t step = steps - 1; step >= 0; --step) {
      const float at = log_p[static_cast<size_t>(step * n + i)];
      const float* row = target_logits(group) + (step * n + i) * stride;
      if (!(at > -std::numeric_limits<float>::infinity())) accepted = step;
      terms[step] = static_cast<double>(static_cast<float>(power_) * at) -
                    static_cast<double>(log_q[i * steps + step]) +
                    log_mass_inside(span, row, draft_logits(group, i, step));
    }
    const float* last = target_logits(group) + (accepted * n + i) * stride;
    const uint32_t key = p.key(group, Particles::kBonus, i, steps);
    draw_keyed(scores(span, last, 1, true, power_), &key, &verdict_.bonus[static_cast<size_t>(i)], nullptr);
    verdict_.num_accepted[static_cast<size_t>(i)] = accepted;
    terms[accepted] = log_normaliser(span, last);
  }
}

// log of the sum of p^power over the vocabulary, for one row of the target.
double Population::log_normaliser(const Span& span, const float* logits) {
  if (power_ == 1.0) return 0.0;
  const float powered = log_total(scores(span, logits, 1, true, power_));
  return powered - static_cast<float>(power_) * log_total(scores(span, logits, 1, true));
}

// log of the draft's probability that a token passes the filters of `target`, a row of filtered scores.
double Population::log_mass_inside(const Span& span, const float* target, const float* draft) {
  masked_.resize(static_cast<size_t>(particles_.vocab));
  std::transform(draft, draft + particles_.vocab, target, masked_.begin(), [](float q, float p) {
    return p == -std::numeric_limits<float>::infinity() ? p : q;
  });
  return log_total(scores(span, masked_.data(), 1, false)) - log_total(scores(span, draft, 1, false));
}

// logsumexp of one row of scores.
float Population::log_total(const ScoreArgs& args) {
  int64_t best = 0;
  float value = 0.0f, total = 0.0f;
  children(args, 1, &best, &value, &total);
  return total;
}

}  // namespace swiftspec::host
