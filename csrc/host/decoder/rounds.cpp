#include "host/decoder/rounds.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "common/noise.h"
#include "kernels_host.h"

namespace swiftspec::host {

namespace {

constexpr int64_t kNoisePositions = 32;  // positions per noise block

}  // namespace

Scoring::Scoring(VocabShard columns, double temperature, const float* bias, bool noisy, uint64_t seed, uint32_t stream)
    : columns_(columns), temperature_(temperature), bias_(bias), noisy_(noisy), seed_(seed), stream_(stream) {}

void Scoring::fill_noise(int64_t low, int64_t high) {
  if (begin_ <= low && high < end_) return;
  begin_ = low;
  end_ = low + std::max(high - low + 1, kNoisePositions);
  std::vector<int32_t> positions(static_cast<size_t>(end_ - begin_));
  std::iota(positions.begin(), positions.end(), static_cast<int32_t>(low));
  block_.resize(positions.size() * static_cast<size_t>(columns_.count));
  gumbel_rows(seed_, stream_, positions.data(), end_ - begin_, static_cast<uint32_t>(columns_.first), columns_.count,
              block_.data());
}

ScoreArgs Scoring::args(const float* logits, int64_t stride, const std::vector<int64_t>& positions, bool noisy,
                        double tau) {
  const auto rows = static_cast<int64_t>(positions.size());
  const auto temperature = static_cast<float>(noisy ? temperature_ : temperature_ * tau);
  ScoreArgs out{logits, bias_, nullptr, nullptr, temperature, static_cast<float>(tau), rows, columns_.count, stride};
  if (!noisy) return out;
  const auto [low, high] = std::minmax_element(positions.begin(), positions.end());
  fill_noise(*low + 1, *high + 1);
  rows_.clear();
  for (const int64_t position : positions) rows_.push_back(position + 1 - begin_);
  out.noise = block_.data();
  out.rows_of_noise = rows_.data();
  return out;
}

uint32_t Scoring::key(int64_t position) const {
  return noise::row_key(seed_, stream_, static_cast<uint32_t>(position + 1));
}

Rounds::Rounds(Decoder& decoder, ModelCache cache) : decoder_(decoder), cache_(std::move(cache)) {
  const PackedModel& model = decoder.model();
  if (model.group != nullptr) merger_.emplace(*model.group, model.timeout_s);
}

VocabShard Rounds::columns(int64_t vocab) const {
  const ShmGroup* group = decoder_.model().group;
  const int64_t width = decoder_.model().head->n;
  if (vocab > width * (group == nullptr ? 1 : group->size())) {
    throw std::invalid_argument("the head is smaller than the vocabulary");
  }
  const int64_t first = group == nullptr ? 0 : std::min(group->rank() * width, vocab);
  return {first, std::min(width, vocab - first), vocab};
}

// The rows from `first` on, whose mask is `mask_` [rows, width].
SequenceRows Rounds::rows_of(int64_t sequence, int64_t first, int64_t prefix, int64_t width) const {
  return {first, static_cast<int64_t>(mask_.size()) / width, mask_.data(), width, prefix + width, sequence};
}

// Runs the rows in `tokens_`, `positions_` and `slots_`; logits of rows from `logits_from` on.
void Rounds::forward(std::vector<SequenceRows> sequence_rows, int64_t logits_from) {
  const auto rows = static_cast<int64_t>(tokens_.size());
  logits_.resize(static_cast<size_t>((rows - logits_from) * decoder_.model().head->n));
  const auto began = std::chrono::steady_clock::now();
  decoder_.forward({tokens_.data(),
                    positions_.data(),
                    slots_.data(),
                    rows,
                    std::move(sequence_rows),
                    &cache_,
                    logits_from,
                    logits_.data()});
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Runs the rows in `tokens_`, `positions_` and `slots_` in both sequences and combines their logits.
void Rounds::forward_guided(int64_t prefix, const Guidance& guidance) {
  const size_t count = tokens_.size();
  for (size_t i = 0; i < count; ++i) {
    tokens_.push_back(i == 0 ? guidance.root : tokens_[i]);
    positions_.push_back(positions_[i] - prefix + guidance.prefix);
    slots_.push_back(slots_[i] - prefix + guidance.prefix);
  }
  const auto rows = static_cast<int64_t>(count);
  forward({rows_of(0, 0, prefix, rows), rows_of(1, rows, guidance.prefix, rows)}, 0);
  positions_.resize(count);
  const size_t half = logits_.size() / 2;
  for (size_t i = 0; i < half; ++i) {
    const float unconditional = logits_[half + i];
    logits_[i] = (logits_[i] - unconditional) * guidance.scale + unconditional;
  }
  logits_.resize(half);
}

// Sets the logits of forbidden tokens to -inf.
void Rounds::apply_token_mask(float* all, int64_t rows, const VocabShard& columns, const TokenMask& allowed) const {
  if (allowed.bits == nullptr) return;
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* bits = allowed.bits + row * allowed.bytes;
    float* logits = all + row * decoder_.model().head->n;
    for (int64_t column = 0; column < columns.count; ++column) {
      const int64_t token = columns.first + column;
      if ((bits[token / 8] >> (token % 8) & 1) == 0) logits[column] = -std::numeric_limits<float>::infinity();
    }
  }
}

int64_t Rounds::expand(Tree& tree, int64_t prefix, const Nodes& pending, int64_t w, int64_t k, Scoring& scoring,
                       bool coupled, double tau, const TokenMaskFn& allowed) {
  const int64_t first = tree.expanded(), num_pending = static_cast<int64_t>(pending.size());
  const Nodes leaves = tree.take_leaves(w);
  const auto count = static_cast<int64_t>(leaves.size());
  if (count == 0) return 0;
  const TokenMask follow = allowed ? allowed(leaves) : TokenMask{};
  const int64_t after = tree.expanded(), width = num_pending + after;
  tokens_ = pending;
  mask_.assign(static_cast<size_t>((num_pending + count) * width), 0);
  slots_.resize(static_cast<size_t>(num_pending));
  std::iota(slots_.begin(), slots_.end(), prefix);
  positions_ = slots_;
  for (int64_t i = 0; i < num_pending; ++i) std::fill_n(mask_.begin() + i * width, i + 1, uint8_t{1});
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* sees = tree.row(first + i);
    const auto row = mask_.begin() + (num_pending + i) * width;
    std::fill_n(row, num_pending, uint8_t{1});
    std::copy(sees, sees + after, row + num_pending);
    tokens_.push_back(tree.token[leaves[static_cast<size_t>(i)]]);
    slots_.push_back(prefix + num_pending + first + i);
    positions_.push_back(prefix + num_pending + std::count(sees, sees + after, uint8_t{1}) - 1);
  }
  forward({rows_of(0, 0, prefix, width)}, num_pending);
  apply_token_mask(logits_.data(), count, scoring.columns(), follow);
  positions_.erase(positions_.begin(), positions_.begin() + num_pending);
  sampled_.resize(static_cast<size_t>(count * k));
  values_.resize(sampled_.size());
  totals_.resize(static_cast<size_t>(count));
  const ScoreArgs scores = scoring.args(logits_.data(), decoder_.model().head->n, positions_, coupled, tau);
  children(scores, k, sampled_.data(), values_.data(), merger_ ? totals_.data() : nullptr);
  if (merger_) (*merger_)(scoring.columns().first, count, k, sampled_.data(), values_.data(), totals_.data());
  tree.add_children(leaves, k, sampled_.data(), values_.data());
  return count;
}

void Rounds::verify(const Nodes& tokens, const Nodes& parents, int64_t prefix, const std::optional<Guidance>& guidance,
                    Scoring& scoring, const TokenMask& allowed, const std::optional<Nodes>& forced, Nodes& path,
                    Nodes& sampled) {
  const auto count = static_cast<int64_t>(tokens.size());
  tokens_ = tokens;
  mask_.assign(static_cast<size_t>(count * count), 0);
  positions_.clear();
  slots_.resize(tokens.size());
  std::iota(slots_.begin(), slots_.end(), prefix);
  for (int64_t i = 0; i < count; ++i) {
    const auto row = mask_.begin() + i * count;
    const int64_t parent = parents[static_cast<size_t>(i)];
    if (parent >= 0) std::copy_n(mask_.begin() + parent * count, i, row);
    row[i] = 1;
    positions_.push_back(parent < 0 ? prefix : positions_[static_cast<size_t>(parent)] + 1);
  }
  if (guidance) {
    forward_guided(prefix, *guidance);
  } else {
    forward({rows_of(0, 0, prefix, count)}, 0);
  }
  draw_nodes(tokens, parents, scoring, allowed);
  if (forced) {
    path = *forced;
    sampled.clear();
    for (size_t i = 1; i < path.size(); ++i) sampled.push_back(tokens[static_cast<size_t>(path[i])]);
    sampled.push_back(sampled_[static_cast<size_t>(path.back())]);
  } else {
    match(tokens, parents, path, sampled);
  }
  if (scoring.penalties && sampled.back() >= 0) scoring.penalties->observe(sampled);
  commit(0, prefix, path);
  if (guidance) commit(1, guidance->prefix, path);
}

// Follows the drawn tokens `sampled_` down the tree.
void Rounds::match(const Nodes& tokens, const Nodes& parents, Nodes& path, Nodes& sampled) const {
  path.assign(1, 0);
  sampled.assign(1, sampled_[0]);
  for (size_t i = 1; i < tokens.size(); ++i) {  // children come after their parents
    if (parents[i] != path.back() || tokens[i] != sampled.back()) continue;
    path.push_back(static_cast<int64_t>(i));
    sampled.push_back(sampled_[i]);
  }
}

// Draws the token after each node into `sampled_`, from the logits of the last forward.
void Rounds::draw_nodes(const Nodes& tokens, const Nodes& parents, Scoring& scoring, const TokenMask& allowed) {
  const auto count = static_cast<int64_t>(tokens.size());
  sampled_.resize(tokens.size());
  values_.resize(tokens.size());
  const bool process = allowed.bits != nullptr || scoring.penalties || scoring.filter;
  if (process) process_rows(tokens, parents, scoring, allowed);
  if (scoring.filter) {
    keys_.clear();
    for (const int64_t position : positions_) keys_.push_back(scoring.key(position));
    return draw_filtered(gather_whole_rows(count, scoring), *scoring.filter, keys_.data(), sampled_.data());
  }
  const float* logits = process ? processed_.data() : logits_.data();
  ScoreArgs args = scoring.args(logits, decoder_.model().head->n, positions_, scoring.noisy(), 1.0);
  if (process) args.bias = nullptr;
  draw(args, sampled_.data(), values_.data());
  if (merger_) (*merger_)(scoring.columns().first, count, 1, sampled_.data(), values_.data(), nullptr);
}

// Writes the logits with token mask, bias and penalties, this rank's columns, to `processed_`.
void Rounds::process_rows(const Nodes& tokens, const Nodes& parents, Scoring& scoring, const TokenMask& allowed) {
  const auto count = static_cast<int64_t>(tokens.size()), stride = decoder_.model().head->n;
  const VocabShard columns = scoring.columns();
  processed_.assign(logits_.begin(), logits_.begin() + count * stride);
  apply_token_mask(processed_.data(), count, columns, allowed);
  for (int64_t row = 0; row < count; ++row) {
    float* logits = processed_.data() + row * stride;
    add_bias(logits, columns, scoring.bias());
    if (!scoring.penalties) continue;
    Nodes path;
    for (auto node = static_cast<size_t>(row); parents[node] >= 0; node = static_cast<size_t>(parents[node])) {
      path.push_back(tokens[node]);
    }
    scoring.penalties->apply(logits, columns, path);
  }
}

// Returns the processed logits of all columns; those of a group are gathered from its ranks.
ScoreArgs Rounds::gather_whole_rows(int64_t rows, const Scoring& scoring) {
  const int64_t width = decoder_.model().head->n, vocab = scoring.columns().vocab;
  ShmGroup* group = decoder_.model().group;
  ScoreArgs args{processed_.data(), nullptr, nullptr, nullptr, scoring.temperature(), 1.0f, rows, vocab, width};
  if (group == nullptr) return args;
  const int64_t size = group->size();
  gathered_.resize(static_cast<size_t>(size * rows * width));
  whole_.resize(gathered_.size());
  group->all_gather(processed_.data(), rows * width * static_cast<int64_t>(sizeof(float)), gathered_.data(),
                    decoder_.model().timeout_s);
  for (int64_t rank = 0; rank < size; ++rank) {
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(gathered_.data() + (rank * rows + row) * width, width, whole_.data() + (row * size + rank) * width);
    }
  }
  args.logits = whole_.data();
  args.stride = size * width;
  return args;
}

void Rounds::copy_logits(const Nodes& nodes, float* out) const {
  const int64_t stride = decoder_.model().head->n;
  for (const int64_t node : nodes) {
    if ((node + 1) * stride > static_cast<int64_t>(logits_.size())) {
      throw std::invalid_argument("the proposal has more nodes than were verified");
    }
    out = std::copy_n(logits_.data() + node * stride, stride, out);
  }
}

std::vector<float> Rounds::probabilities(const Nodes& tokens, const Nodes& parents, const Scoring& scoring) {
  const auto count = static_cast<int64_t>(tokens.size()), stride = decoder_.model().head->n;
  if (count * stride > static_cast<int64_t>(logits_.size())) {
    throw std::invalid_argument("the proposal has more nodes than were verified");
  }
  constexpr float kUnknown = -std::numeric_limits<float>::infinity();
  totals_.assign(tokens.size(), kUnknown);
  std::vector<float> out;
  for (size_t i = 1; i < tokens.size(); ++i) {
    const float* row = logits_.data() + parents[i] * stride;
    float& total = totals_[static_cast<size_t>(parents[i])];
    if (total == kUnknown) {
      int64_t best = 0;
      float value = 0.0F;
      children({row, nullptr, nullptr, nullptr, 1.0F, 1.0F, 1, scoring.columns().count, stride}, 1, &best, &value,
               &total);
    }
    out.push_back(std::exp(row[tokens[i]] - total));
  }
  return out;
}

void Rounds::commit(int64_t sequence, int64_t prefix, const Nodes& path) {
  slots_.clear();
  for (const int64_t node : path) slots_.push_back(prefix + node);
  cache_.move(sequence, slots_, prefix);
}

}  // namespace swiftspec::host
