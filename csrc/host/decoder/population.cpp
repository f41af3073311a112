#include "host/decoder/population.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "common/noise.h"
#include "kernels_host.h"

namespace swiftspec::host {

Population::Population(const Side& draft, const Side& target, const Particles& particles, Law law, double power,
                       double threshold, bool deferred_bonus)
    : draft_(draft), target_(target), particles_(particles), law_(law), power_(power), threshold_(threshold),
      deferred_(deferred_bonus) {
  drafted_.resize(static_cast<size_t>(law == Law::reject ? particles.steps : 1));
}

void Population::round(const std::vector<Span>& spans, int64_t* head, int64_t width, const Told& told) {
  const Particles& p = particles_;
  int64_t groups = 0, group = 0;
  for (const Span& span : spans) groups += span.groups;
  look(groups);
  draft(spans, groups, told);
  score(groups, told);
  for (const Span& span : spans) {
    for (const int64_t end = group + span.groups; group < end; ++group) {
      verdict_.kept.assign(static_cast<size_t>(p.count), p.steps);
      verdict_.extra.resize(static_cast<size_t>(p.count));
      verdict_.terms.assign(static_cast<size_t>(p.handed_out()), 0.0);
      if (law_ == Law::weigh) weigh(span, group);
      if (law_ == Law::match) match(span, group);
      if (law_ == Law::reject) reject(span, group);
      p.take(group, drafts(group), verdict_);
      if (law_ == Law::weigh) p.resample(group, threshold_);
      tell(group, width, head + group * (3 + p.text + width));
    }
  }
}

// ---- rows

// What each row's pending token sees.
void Population::look(int64_t groups) {
  const Particles& p = particles_;
  views_of_.assign(1, 0);
  for (int64_t group = 0; group < groups; ++group) views_of_.push_back(views_of_.back() + p.count * p.width(group));
  views_.resize(static_cast<size_t>(views_of_.back()));
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t row = 0; row < p.count; ++row) {
      uint8_t* sees = std::copy_n(p.row(group, row).mask, p.width(group), view(group, row)) - p.width(group);
      sees[p.pending_slot(group, row)] = 1;
    }
  }
}

uint8_t* Population::view(int64_t group, int64_t row) {
  return views_.data() + views_of_[static_cast<size_t>(group)] + row * particles_.width(group);
}

// `rows`: of each particle in the next forward.
void Population::open(int64_t rows) {
  for (Nodes* each : {&tokens_, &positions_, &slots_}) each->clear();
  mask_.clear();
  mask_.reserve(static_cast<size_t>(rows * views_of_.back()));  // parts point into it
  parts_.clear();
}

// Another row of a group, which sees what the particle `row` sees; that may be changed.
uint8_t* Population::add(int64_t group, int64_t token, int64_t position, int64_t slot, int64_t row) {
  const uint8_t* sees = view(group, row);
  tokens_.push_back(token);
  positions_.push_back(position);
  slots_.push_back(particles_.prefix[group] + slot);
  mask_.insert(mask_.end(), sees, sees + particles_.width(group));
  return mask_.data() + mask_.size() - particles_.width(group);
}

// The group's rows since the last part are one.
void Population::close(int64_t group, bool target) {
  const Side& side = this->side(target);
  const int64_t first = parts_.empty() ? 0 : parts_.back().first + parts_.back().rows;
  const auto rows = static_cast<int64_t>(tokens_.size()) - first;
  const int64_t width = particles_.width(group), skipped = particles_.sequences[group] * side.region_stride;
  parts_.push_back({first, rows, mask_.data() + mask_.size() - rows * width, width, particles_.prefix[group] + width,
                    side.keys + skipped, side.values + skipped});
}

void Population::forward(bool target, int64_t logits_from, std::vector<float>& logits, const Told& told) {
  const Side& side = this->side(target);
  const auto rows = static_cast<int64_t>(tokens_.size());
  logits.resize(static_cast<size_t>((rows - logits_from) * side.decoder.stack().head->n));
  float* wanted = logits_from < rows ? logits.data() : nullptr;
  const auto began = std::chrono::steady_clock::now();
  side.decoder.forward({tokens_.data(), positions_.data(), slots_.data(), rows, parts_, side.capacity,
                        side.layer_stride, logits_from, wanted});
  told(target, rows, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
}

// ---- the draft

// Rows of the tokens that the draft has no KV of: pending ones after all last ones, since only they have logits.
void Population::read_tails(int64_t groups) {
  const Particles& p = particles_;
  open(2);
  for (const bool pending : {false, true}) {
    if (!pending && !deferred_) continue;
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = 0; i < p.count; ++i) {
        const Particle row = p.row(group, i);
        const int64_t slot = p.pending_slot(group, i), last = *row.finished != 0 ? slot : row.tail_slots[0];
        uint8_t* sees = add(group, row.tail_tokens[pending], row.tail_positions[pending], pending ? slot : last, i);
        if (pending) continue;
        sees[slot] = 0;
        sees[last] = 1;
      }
      close(group, false);
    }
  }
}

void Population::draft(const std::vector<Span>& spans, int64_t groups, const Told& told) {
  const Particles& p = particles_;
  const int64_t n = p.count;
  drafts_.resize(static_cast<size_t>(groups * n * p.steps));
  log_q_.resize(drafts_.size());
  read_tails(groups);
  for (int64_t step = 0; step < p.steps; ++step) {
    std::vector<float>& logits = drafted_[law_ == Law::reject ? static_cast<size_t>(step) : 0];
    forward(false, step == 0 && deferred_ ? groups * n : 0, logits, told);
    draw_drafts(spans, step, logits.data());
    const bool reads = step + 1 < p.steps || !deferred_;  // what was drawn
    open(1);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t slot = p.slot(group, i, step);
        view(group, i)[slot] = 1;
        if (!reads) continue;
        add(group, drafts(group)[i * p.steps + step], p.row(group, i).tail_positions[1] + step + 1, slot, i);
      }
      if (reads) close(group, false);
    }
  }
  std::vector<float> none;
  if (!deferred_) forward(false, groups * n, none, told);
}

void Population::draw_drafts(const std::vector<Span>& spans, int64_t step, const float* logits) {
  const Particles& p = particles_;
  int64_t group = 0;
  for (const Span& span : spans) {
    const int64_t rows = span.groups * p.count, first = group * p.count;
    keys_.clear();
    for (const int64_t end = group + span.groups; group < end; ++group) {
      for (int64_t i = 0; i < p.count; ++i) {
        keys_.push_back(law_ == Law::match ? target_key(group, i, step) : p.key(group, Particles::kDraft, i, step));
      }
    }
    drawn_.resize(static_cast<size_t>(rows));
    values_.assign(static_cast<size_t>(rows), 0.0f);
    const ScoreArgs args = scores(span, logits + first * draft_.decoder.stack().head->n, rows, false);
    draw_rows(args, span, law_ == Law::match ? nullptr : values_.data());
    for (int64_t row = 0; row < rows; ++row) {  // -1: its weight tells, or it is rejected
      drafts_[static_cast<size_t>((first + row) * p.steps + step)] =
          std::max<int64_t>(drawn_[static_cast<size_t>(row)], 0);
      log_q_[static_cast<size_t>((first + row) * p.steps + step)] = values_[static_cast<size_t>(row)];
    }
  }
}

// By `keys_`, to `drawn_`.
void Population::draw_rows(const ScoreArgs& args, const Span& span, float* log_probs) {
  if (span.temperature > 0) return draw_keyed(args, keys_.data(), drawn_.data(), log_probs);
  draw(args, drawn_.data(), nullptr);
}

// ---- the target

void Population::score(int64_t groups, const Told& told) {
  const Particles& p = particles_;
  open(p.steps + 1);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t step = 0; step <= p.steps; ++step) {
      for (int64_t i = 0; i < p.count; ++i) {
        const Particle row = p.row(group, i);
        const int64_t token = step == 0 ? row.tail_tokens[1] : drafts(group)[i * p.steps + step - 1];
        const int64_t slot = step == 0 ? p.pending_slot(group, i) : p.slot(group, i, step - 1);
        uint8_t* sees = add(group, token, row.tail_positions[1] + step, slot, i);
        for (int64_t later = step; later < p.steps; ++later) sees[p.slot(group, i, later)] = 0;
      }
    }
    close(group, true);
  }
  forward(true, 0, scored_, told);
}

ScoreArgs Population::scores(const Span& span, const float* logits, int64_t rows, bool target, double power) const {
  const double temperature = span.temperature > 0 ? span.temperature : 1.0;
  return {logits, span.bias, nullptr, nullptr, static_cast<float>(temperature / power), 1.0f, rows, particles_.vocab,
          side(target).decoder.stack().head->n};
}

const float* Population::scored(int64_t group) const {
  return scored_.data() + group * particles_.handed_out() * target_.decoder.stack().head->n;
}

uint32_t Population::target_key(int64_t group, int64_t row, int64_t draw) const {
  const int64_t position = particles_.row(group, row).tail_positions[1] + 1 + draw;
  return noise::mix(particles_.target[group] ^ static_cast<uint32_t>(position));
}

void Population::tell(int64_t group, int64_t width, int64_t* head) const {
  const Particles& p = particles_;
  bool broken = false;
  int64_t finished = 0;
  for (const int64_t extra : verdict_.extra) broken |= extra < 0;
  for (const double term : verdict_.terms) broken |= std::isnan(term);
  for (int64_t i = 0; i < p.count; ++i) finished += *p.row(group, i).finished;
  head[0] = broken ? -1 : p.common(group);
  head[1] = finished;
  head[2] = std::accumulate(verdict_.kept.begin(), verdict_.kept.end(), int64_t{0});
  const Particle first = p.row(group, 0);
  std::copy_n(first.tokens, *first.length, head + 3);
  p.columns(group, width, head + 3 + p.text);
}

}  // namespace swiftspec::host
