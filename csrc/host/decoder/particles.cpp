#include "host/decoder/particles.h"

#include <algorithm>
#include <cmath>

#include "common/noise.h"
#include "common/resample.h"

namespace swiftspec::host {

Particle Particles::row(int64_t group, int64_t row) const {
  const int64_t at = group * count + row;
  int64_t* line = path + at * (kHeaderWords + max_tokens);
  return {mask + at * slots, ends + 2 * at, ends + 2 * at + 1, line, line + 1, line + 3, line + 5, line + kHeaderWords};
}

uint32_t Particles::key(int64_t group, int64_t purpose, int64_t row, int64_t draw) const {
  return noise::mix(keys[(group * kPurposes + purpose) * count + row] ^ static_cast<uint32_t>(clock[group] + draw));
}

int64_t Particles::pending_slot(int64_t group, int64_t row) const {
  const Particle p = this->row(group, row);
  return *p.finished != 0 ? slot(group, row, steps) : p.tail_slots[1];
}

void Particles::append(int64_t group, const Particle& p, const int64_t* drafts, int64_t accepted, int64_t bonus,
                       const double* terms, double& weight) const {
  for (int64_t i = 0; i <= accepted && *p.finished == 0; ++i) {
    const int64_t token = i < accepted ? drafts[i] : bonus;
    const bool stop = stops[group * vocab + token] != 0;
    p.tokens[(*p.length)++] = token;
    weight += terms[i];
    *p.stopped |= static_cast<uint8_t>(stop);
    *p.finished |= static_cast<uint8_t>(stop || *p.length >= limit[group]);
  }
}

void Particles::append_round(int64_t group, const int64_t* drafts, const Verdict& verdict) const {
  for (int64_t row = 0; row < count; ++row, drafts += steps) {
    const Particle p = this->row(group, row);
    const auto at = static_cast<size_t>(row);
    const int64_t accepted = verdict.num_accepted[at], bonus = std::max<int64_t>(verdict.bonus[at], 0);
    append(group, p, drafts, accepted, bonus, verdict.terms.data() + row * (steps + 1),
           log_weights[group * count + row]);
    if (*p.finished != 0) std::fill_n(p.mask, width(group), uint8_t{0});
    for (int64_t step = 0; step <= steps && *p.finished == 0; ++step) {
      p.mask[slot(group, row, step)] = static_cast<uint8_t>(step < accepted || step == steps);
    }
    if (accepted > 0) {  // else the pending token stays the token before the bonus token
      p.tail_tokens[0] = drafts[accepted - 1];
      p.tail_slots[0] = slot(group, row, accepted - 1);
    } else {
      p.tail_tokens[0] = p.tail_tokens[1];
      p.tail_slots[0] = p.tail_slots[1];
    }
    p.tail_tokens[1] = bonus;
    p.tail_slots[1] = slot(group, row, steps);
    if (*p.finished != 0) continue;  // positions must stay within the RoPE tables
    p.tail_positions[0] = p.tail_positions[1] + accepted;
    p.tail_positions[1] = p.tail_positions[0] + 1;
  }
  base[group] += slots_per_round();
  clock[group] += steps + 1;
}

void Particles::resample(int64_t group, double threshold) const {
  resample(group, threshold, resampling[group * max_rounds + rounds[group]]);
}

void Particles::resample(int64_t group, double threshold, double uniform) const {
  double* weights = log_weights + group * count;
  const double log_total = resample::log_sum(weights, count);
  std::vector<double> shares(static_cast<size_t>(count));
  std::transform(weights, weights + count, shares.begin(), [&](double w) { return std::exp(w - log_total); });
  const double size = resample::effective_sample_size(shares.data(), count);
  ess[group] += size;
  rounds[group] += 1;
  if (!(size < threshold * static_cast<double>(count))) return;
  std::vector<int64_t> source(static_cast<size_t>(count));
  resample::systematic_resampling(shares.data(), count, uniform, source.data());
  log_z[group] += log_total - std::log(static_cast<double>(count));
  resampled[group] += 1;
  std::fill_n(weights, count, 0.0);
  for (int64_t row = 0; row < count; ++row) {
    const int64_t from = source[static_cast<size_t>(row)];
    if (from != row) copy(group, from, row);
  }
}

// Copies a particle. The new slots of the round are already included in `base`.
void Particles::copy(int64_t group, int64_t from, int64_t to) const {
  const Particle a = row(group, from), b = row(group, to);
  std::copy_n(a.mask, base[group], b.mask);
  std::copy_n(a.finished, 2, b.finished);
  std::copy_n(a.length, kHeaderWords + *a.length, b.length);
}

int64_t Particles::common_prefix(int64_t group) const {
  const Particle first = row(group, 0);
  int64_t shared = *first.length;
  for (int64_t i = 1; i < count; ++i) {
    const Particle p = row(group, i);
    shared = std::min(shared, *p.length);
    shared = std::mismatch(first.tokens, first.tokens + shared, p.tokens).first - first.tokens;
  }
  return shared;
}

void Particles::classify_slots(int64_t group, int64_t width, int64_t* out) const {
  int64_t live = 0;
  std::fill_n(out, width, int64_t{0});
  for (int64_t i = 0; i < count; ++i) {
    const Particle p = row(group, i);
    live += *p.finished == 0;
    for (int64_t slot = 0; slot < width; ++slot) out[slot] += p.mask[slot];
  }
  for (int64_t slot = 0; slot < width; ++slot) {
    out[slot] = out[slot] == 0 ? kDead : out[slot] == live ? kShared : kLive;
  }
  for (int64_t i = 0; i < count; ++i) {
    const Particle p = row(group, i);
    for (const int64_t slot : {p.tail_slots[0], p.tail_slots[1]}) {
      if (slot < width && p.mask[slot] != 0) out[slot] = kLive;  // the tail slots of finished rows may be stale
    }
  }
}

void Particles::compact(int64_t group, int64_t promoted, const std::vector<int64_t>& surviving) const {
  std::vector<int64_t> new_slot(static_cast<size_t>(slots));
  for (size_t i = 0; i < surviving.size(); ++i) new_slot[static_cast<size_t>(surviving[i])] = static_cast<int64_t>(i);
  for (int64_t i = 0; i < count; ++i) {
    const Particle p = row(group, i);
    const auto accepted = static_cast<int64_t>(surviving.size());
    for (int64_t slot = 0; slot < accepted; ++slot) p.mask[slot] = p.mask[surviving[static_cast<size_t>(slot)]];
    std::fill(p.mask + accepted, p.mask + std::max(accepted, base[group]), uint8_t{0});
    for (int64_t* slot : {p.tail_slots, p.tail_slots + 1}) *slot = new_slot[static_cast<size_t>(*slot)];
  }
  base[group] = static_cast<int64_t>(surviving.size());
  prefix[group] += promoted;
}

}  // namespace swiftspec::host
