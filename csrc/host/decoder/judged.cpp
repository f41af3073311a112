// What becomes of a round's draft tokens; swiftspec/smc/verification.py has the same.
#include <algorithm>
#include <cmath>
#include <limits>

#include "host/decoder/population.h"
#include "kernels_host.h"

namespace swiftspec::host {

// To `values_` [K, N].
void Population::log_probs_of_drafts(const Span& span, int64_t group) {
  const Particles& p = particles_;
  const int64_t rows = p.steps * p.count;
  drawn_.resize(static_cast<size_t>(rows));
  values_.resize(drawn_.size());
  for (int64_t row = 0; row < rows; ++row) {
    drawn_[static_cast<size_t>(row)] = drafts(group)[row % p.count * p.steps + row / p.count];
  }
  log_probs(scores(span, scored(group), rows, true), drawn_.data(), values_.data());
}

void Population::weigh(const Span& span, int64_t group) {
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
  const float* last = scored(group) + steps * n * target_.decoder.stack().head->n;
  keys_.clear();
  for (int64_t i = 0; i < n; ++i) keys_.push_back(p.key(group, Particles::kExtra, i, steps));
  draw_keyed(scores(span, last, n, true, power_), keys_.data(), verdict_.extra.data(), nullptr);
  if (power_ == 1.0) return;
  values_.resize(static_cast<size_t>(3 * n));
  drawn_.resize(static_cast<size_t>(n));
  float *best = values_.data(), *whole = best + n, *powered = whole + n;
  children(scores(span, last, n, true), 1, drawn_.data(), best, whole);
  children(scores(span, last, n, true, power_), 1, drawn_.data(), best, powered);
  for (int64_t i = 0; i < n; ++i) {
    verdict_.terms[static_cast<size_t>(i * (steps + 1) + steps)] = powered[i] - static_cast<float>(power_) * whole[i];
  }
}

// They stay as long as plain decoding says them.
void Population::match(const Span& span, int64_t group) {
  const Particles& p = particles_;
  const int64_t rows = p.handed_out();
  keys_.clear();
  for (int64_t row = 0; row < rows; ++row) keys_.push_back(target_key(group, row % p.count, row / p.count));
  drawn_.resize(static_cast<size_t>(rows));
  draw_rows(scores(span, scored(group), rows, true), span, nullptr);
  for (int64_t i = 0; i < p.count; ++i) {
    const int64_t* mine = drafts(group) + i * p.steps;
    int64_t kept = 0;
    while (kept < p.steps && drawn_[static_cast<size_t>(kept * p.count + i)] == mine[kept]) ++kept;
    verdict_.kept[static_cast<size_t>(i)] = kept;
    verdict_.extra[static_cast<size_t>(i)] = drawn_[static_cast<size_t>(kept * p.count + i)];
  }
}

// Source: Leviathan et al. 2023, algorithm 1.
void Population::reject(const Span& span, int64_t group) {
  const Particles& p = particles_;
  log_probs_of_drafts(span, group);
  for (int64_t i = 0; i < p.count; ++i) {
    const float* log_q = log_q_.data() + (group * p.count + i) * p.steps;
    int64_t kept = 0;
    for (; kept < p.steps; ++kept) {
      const float log_p = values_[static_cast<size_t>(kept * p.count + i)];
      const float coin = std::log(static_cast<float>(p.uniform(group, i, kept)));
      if (!(coin < log_p - log_q[kept] && log_p > -std::numeric_limits<float>::infinity())) break;
    }
    verdict_.kept[static_cast<size_t>(i)] = kept;
    verdict_.extra[static_cast<size_t>(i)] = residual(span, group, i, kept);
  }
}

// The token after `kept` that stay: of norm(max(0, p - q)), after all of them of p, and of p too where rounding leaves
// nothing else or q is none; -1 where p is none.
int64_t Population::residual(const Span& span, int64_t group, int64_t row, int64_t kept) {
  const Particles& p = particles_;
  const int64_t stride = draft_.decoder.stack().head->n;
  const float* logits = scored(group) + (kept * p.count + row) * target_.decoder.stack().head->n;
  const ScoreArgs target = scores(span, logits, 1, true);
  const uint32_t key = p.key(group, Particles::kExtra, row, p.steps);
  int64_t token = -1;
  if (kept < p.steps) {
    const float* drafted = drafted_[static_cast<size_t>(kept)].data() + (group * p.count + row) * stride;
    token = draw_residual(target, scores(span, drafted, 1, false), key);
  }
  if (token < 0) draw_keyed(target, &key, &token, nullptr);
  return token;
}

}  // namespace swiftspec::host
