#include "host/decoder/population.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "common/noise.h"
#include "kernels_host.h"

namespace swiftspec::host {

Population::Population(const ModelWithCache& draft, const ModelWithCache& target, const Particles& particles,
                       double power, double threshold, bool deferred_bonus)
    : draft_(draft), target_(target), particles_(particles), power_(power), threshold_(threshold),
      deferred_bonus_(deferred_bonus) {
  draft_logits_.resize(static_cast<size_t>(particles.steps));
}

void Population::round(const std::vector<Span>& spans, int64_t* summary, int64_t width,
                       const ForwardCallback& on_forward) {
  const Particles& p = particles_;
  int64_t groups = 0, group = 0;
  for (const Span& span : spans) groups += span.groups;
  keeps_logits_ = std::any_of(spans.begin(), spans.end(), [](const Span& span) { return span.filter.has_value(); });
  init_views(groups);
  init_penalties(spans, groups);
  draft(spans, groups, on_forward);
  score(groups, on_forward);
  for (const Span& span : spans) {
    for (const int64_t end = group + span.groups; group < end; ++group) {
      verdict_.num_accepted.assign(static_cast<size_t>(p.count), p.steps);
      verdict_.bonus.resize(static_cast<size_t>(p.count));
      verdict_.terms.assign(static_cast<size_t>(p.slots_per_round()), 0.0);
      process_target(span, group);
      if (span.filter) weigh_kept_drafts(span, group);
      else weigh_drafts(span, group);
      p.append_round(group, drafts(group), verdict_);
      p.resample(group, threshold_);
      write_summary(group, width, summary + group * (2 + p.max_tokens + width));
    }
  }
}

// ---- rows

// Initialises each row's visible slots to those of its pending token.
void Population::init_views(int64_t groups) {
  const Particles& p = particles_;
  view_offsets_.assign(1, 0);
  for (int64_t group = 0; group < groups; ++group) {
    view_offsets_.push_back(view_offsets_.back() + p.count * p.width(group));
  }
  views_.resize(static_cast<size_t>(view_offsets_.back()));
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t row = 0; row < p.count; ++row) {
      uint8_t* sees = std::copy_n(p.row(group, row).mask, p.width(group), view(group, row)) - p.width(group);
      sees[p.pending_slot(group, row)] = 1;
    }
  }
}

uint8_t* Population::view(int64_t group, int64_t row) {
  return views_.data() + view_offsets_[static_cast<size_t>(group)] + row * particles_.width(group);
}

// Begins a forward of `rows` rows per particle.
void Population::begin_batch(int64_t rows) {
  for (Nodes* each : {&tokens_, &positions_, &slots_}) each->clear();
  mask_.clear();
  mask_.reserve(static_cast<size_t>(rows * view_offsets_.back()));  // sequence_rows_ points into it
  sequence_rows_.clear();
}

// Appends a row that sees the slots of particle `row`. Returns its mask row, which the caller may change.
uint8_t* Population::add_row(int64_t group, int64_t token, int64_t position, int64_t slot, int64_t row) {
  const uint8_t* sees = view(group, row);
  tokens_.push_back(token);
  positions_.push_back(position);
  slots_.push_back(particles_.prefix[group] + slot);
  mask_.insert(mask_.end(), sees, sees + particles_.width(group));
  return mask_.data() + mask_.size() - particles_.width(group);
}

// Makes the group's rows since the last call one SequenceRows.
void Population::end_group(int64_t group) {
  const int64_t first = sequence_rows_.empty() ? 0 : sequence_rows_.back().first + sequence_rows_.back().rows;
  const auto rows = static_cast<int64_t>(tokens_.size()) - first;
  const int64_t width = particles_.width(group);
  sequence_rows_.push_back({first, rows, mask_.data() + mask_.size() - rows * width, width,
                            particles_.prefix[group] + width, particles_.sequences[group]});
}

void Population::forward(bool target, int64_t logits_from, std::vector<float>& logits,
                         const ForwardCallback& on_forward) {
  const ModelWithCache& side = this->side(target);
  const auto rows = static_cast<int64_t>(tokens_.size());
  logits.resize(static_cast<size_t>((rows - logits_from) * side.decoder.model().head->n));
  float* wanted = logits_from < rows ? logits.data() : nullptr;
  const auto began = std::chrono::steady_clock::now();
  side.decoder.forward({tokens_.data(), positions_.data(), slots_.data(), rows, sequence_rows_, &side.cache,
                        logits_from, wanted});
  on_forward(target, rows, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
}

// ---- bias, min_tokens and penalties

// Makes the penalties of the groups from their prompts. They count no output: `penalise` passes the text of each row,
// since rows differ and resampling replaces them.
void Population::init_penalties(const std::vector<Span>& spans, int64_t groups) {
  const int64_t vocab = particles_.vocab;
  penalties_.assign(static_cast<size_t>(groups), std::nullopt);
  int64_t group = 0;
  for (const Span& span : spans) {
    for (const int64_t end = group + span.groups; group < end; ++group) {
      if (!span.penalties) continue;
      const uint8_t* prompt = particles_.prompts + group * vocab;
      path_.clear();
      for (int64_t token = 0; token < vocab; ++token) {
        if (prompt[token] != 0) path_.push_back(token);
      }
      penalties_[static_cast<size_t>(group)].emplace(vocab, *span.penalties, path_, Nodes{});
    }
  }
}

// Applies min_tokens, bias and penalties to the group's logits [N, stride] of the token after `step` draft tokens, in
// place. Without penalties and min_tokens, `scores` adds the bias.
void Population::penalise(const Span& span, int64_t group, int64_t step, float* logits, int64_t stride) {
  if (!span.penalised()) return;
  const Particles& p = particles_;
  const VocabShard columns{0, p.vocab, p.vocab};
  const uint8_t* suppressed = p.suppressed + group * p.vocab;
  std::optional<Penalties>& penalties = penalties_[static_cast<size_t>(group)];
  for (int64_t i = 0; i < p.count; ++i, logits += stride) {
    const Particle row = p.row(group, i);
    const int64_t* mine = drafts(group) + i * p.steps;
    if (*row.length + step < span.min_tokens) {
      for (int64_t token = 0; token < p.vocab; ++token) {
        if (suppressed[token] != 0) logits[token] = -std::numeric_limits<float>::infinity();
      }
    }
    add_bias(logits, columns, span.bias);
    if (!penalties) continue;
    path_.assign(row.tokens, row.tokens + *row.length);
    path_.insert(path_.end(), mine, mine + step);
    penalties->apply(logits, columns, path_);
  }
}

// ---- the draft

// Rows of the tokens without KV in the draft. Pending tokens come last, since only they need logits.
void Population::add_pending_rows(int64_t groups) {
  const Particles& p = particles_;
  begin_batch(2);
  for (const bool pending : {false, true}) {
    if (!pending && !deferred_bonus_) continue;
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = 0; i < p.count; ++i) {
        const Particle row = p.row(group, i);
        const int64_t slot = p.pending_slot(group, i), last = *row.finished != 0 ? slot : row.tail_slots[0];
        uint8_t* sees = add_row(group, row.tail_tokens[pending], row.tail_positions[pending], pending ? slot : last, i);
        if (pending) continue;
        sees[slot] = 0;
        sees[last] = 1;
      }
      end_group(group);
    }
  }
}

void Population::draft(const std::vector<Span>& spans, int64_t groups, const ForwardCallback& on_forward) {
  const Particles& p = particles_;
  const int64_t n = p.count;
  drafts_.resize(static_cast<size_t>(groups * n * p.steps));
  log_q_.resize(drafts_.size());
  add_pending_rows(groups);
  for (int64_t step = 0; step < p.steps; ++step) {
    std::vector<float>& logits = draft_logits_[keeps_logits_ ? static_cast<size_t>(step) : 0];
    forward(false, step == 0 && deferred_bonus_ ? groups * n : 0, logits, on_forward);
    draw_drafts(spans, step, logits.data());
    const bool reads = step + 1 < p.steps || !deferred_bonus_;  // the drawn tokens are prefilled
    begin_batch(1);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t slot = p.slot(group, i, step);
        view(group, i)[slot] = 1;
        if (!reads) continue;
        add_row(group, drafts(group)[i * p.steps + step], p.row(group, i).tail_positions[1] + step + 1, slot, i);
      }
      if (reads) end_group(group);
    }
  }
  std::vector<float> none;
  if (!deferred_bonus_) forward(false, groups * n, none, on_forward);
}

void Population::draw_drafts(const std::vector<Span>& spans, int64_t step, float* logits) {
  const Particles& p = particles_;
  const int64_t stride = draft_.decoder.model().head->n;
  int64_t group = 0;
  for (const Span& span : spans) {
    const int64_t rows = span.groups * p.count, first = group * p.count;
    keys_.clear();
    for (const int64_t end = group + span.groups; group < end; ++group) {
      penalise(span, group, step, logits + group * p.count * stride, stride);
      for (int64_t i = 0; i < p.count; ++i) keys_.push_back(p.key(group, Particles::kDraft, i, step));
    }
    sampled_.resize(static_cast<size_t>(rows));
    values_.assign(static_cast<size_t>(rows), 0.0f);
    draw_keyed(scores(span, logits + first * stride, rows, false), keys_.data(), sampled_.data(), values_.data());
    for (int64_t row = 0; row < rows; ++row) {  // for -1 the weight is not finite
      drafts_[static_cast<size_t>((first + row) * p.steps + step)] =
          std::max<int64_t>(sampled_[static_cast<size_t>(row)], 0);
      log_q_[static_cast<size_t>((first + row) * p.steps + step)] = values_[static_cast<size_t>(row)];
    }
  }
}

// ---- the target

void Population::score(int64_t groups, const ForwardCallback& on_forward) {
  const Particles& p = particles_;
  begin_batch(p.steps + 1);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t step = 0; step <= p.steps; ++step) {
      for (int64_t i = 0; i < p.count; ++i) {
        const Particle row = p.row(group, i);
        const int64_t token = step == 0 ? row.tail_tokens[1] : drafts(group)[i * p.steps + step - 1];
        const int64_t slot = step == 0 ? p.pending_slot(group, i) : p.slot(group, i, step - 1);
        uint8_t* sees = add_row(group, token, row.tail_positions[1] + step, slot, i);
        for (int64_t later = step; later < p.steps; ++later) sees[p.slot(group, i, later)] = 0;
      }
    }
    end_group(group);
  }
  forward(true, 0, target_logits_, on_forward);
}

// Applies min_tokens and penalties to the target's logits of a group. If the verification needs the distribution
// itself, they become filtered scores.
void Population::process_target(const Span& span, int64_t group) {
  const Particles& p = particles_;
  const int64_t stride = target_.decoder.model().head->n;
  float* logits = target_logits(group);
  for (int64_t step = 0; step <= p.steps; ++step) penalise(span, group, step, logits + step * p.count * stride, stride);
  if (!span.filter) return;
  const float* bias = span.penalised() ? nullptr : span.bias;
  const auto temperature = static_cast<float>(span.temperature);
  filter_scores({logits, bias, nullptr, nullptr, temperature, 1.0f, p.slots_per_round(), p.vocab, stride}, *span.filter,
                logits);
}

// The scores of processed logits. Those that are filtered already have bias and temperature.
ScoreArgs Population::scores(const Span& span, const float* logits, int64_t rows, bool target, double power) const {
  const bool filtered = target && span.filter;
  const double temperature = filtered ? 1.0 : span.temperature;
  const float* bias = filtered || span.penalised() ? nullptr : span.bias;
  return {logits, bias, nullptr, nullptr, static_cast<float>(temperature / power), 1.0f, rows, particles_.vocab,
          side(target).decoder.model().head->n};
}

float* Population::target_logits(int64_t group) {
  return target_logits_.data() + group * particles_.slots_per_round() * target_.decoder.model().head->n;
}

const float* Population::draft_logits(int64_t group, int64_t row, int64_t step) const {
  const int64_t at = group * particles_.count + row;
  return draft_logits_[static_cast<size_t>(step)].data() + at * draft_.decoder.model().head->n;
}

void Population::write_summary(int64_t group, int64_t width, int64_t* summary) const {
  const Particles& p = particles_;
  bool broken = false;
  int64_t finished = 0;
  for (const int64_t bonus : verdict_.bonus) broken |= bonus < 0;
  for (const double term : verdict_.terms) broken |= std::isnan(term);
  for (int64_t i = 0; i < p.count; ++i) finished += *p.row(group, i).finished;
  summary[0] = broken ? -1 : p.common_prefix(group);
  summary[1] = finished;
  const Particle first = p.row(group, 0);
  std::copy_n(first.tokens, *first.length, summary + 2);
  p.classify_slots(group, width, summary + 2 + p.max_tokens);
}

}  // namespace swiftspec::host
