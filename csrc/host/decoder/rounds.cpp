#include "host/decoder/rounds.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

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

Rounds::Rounds(Decoder& decoder, const Region& region) : decoder_(decoder), region_(region) {
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

// Runs the rows in `tokens_`, `positions_`, `slots_` and `mask_` [rows, width]; logits of rows from `logits_from` on.
void Rounds::forward(int64_t prefix, int64_t width, int64_t logits_from) {
  const auto rows = static_cast<int64_t>(tokens_.size());
  logits_.resize(static_cast<size_t>((rows - logits_from) * decoder_.model().head->n));
  const auto began = std::chrono::steady_clock::now();
  decoder_.forward({tokens_.data(),
                    positions_.data(),
                    slots_.data(),
                    rows,
                    {{0, rows, mask_.data(), width, prefix + width, region_.keys, region_.values}},
                    region_.capacity,
                    region_.layer_stride,
                    logits_from,
                    logits_.data()});
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Sets the logits of forbidden tokens to -inf.
void Rounds::apply_token_mask(int64_t rows, const VocabShard& columns, const TokenMask& allowed) {
  if (allowed.bits == nullptr) return;
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* bits = allowed.bits + row * allowed.bytes;
    float* logits = logits_.data() + row * decoder_.model().head->n;
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
  forward(prefix, width, num_pending);
  apply_token_mask(count, scoring.columns(), follow);
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

void Rounds::verify(const Nodes& tokens, const Nodes& parents, int64_t prefix, Scoring& scoring,
                    const TokenMask& allowed, Nodes& path, Nodes& sampled) {
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
  forward(prefix, count, 0);
  apply_token_mask(count, scoring.columns(), allowed);
  sampled_.resize(tokens.size());
  values_.resize(tokens.size());
  draw(scoring.args(logits_.data(), decoder_.model().head->n, positions_, scoring.noisy(), 1.0), sampled_.data(),
       values_.data());
  if (merger_) (*merger_)(scoring.columns().first, count, 1, sampled_.data(), values_.data(), nullptr);
  path.assign(1, 0);
  sampled.assign(1, sampled_[0]);
  for (int64_t node = 1; node < count; ++node) {  // children come after their parents
    const auto i = static_cast<size_t>(node);
    if (parents[i] != path.back() || tokens[i] != sampled.back()) continue;
    path.push_back(node);
    sampled.push_back(sampled_[i]);
  }
  commit(prefix, path);
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

void Rounds::commit(int64_t prefix, const Nodes& path) {
  slots_.clear();
  for (const int64_t node : path) slots_.push_back(prefix + node);
  const PackedModel& model = decoder_.model();
  const int64_t slot_bytes = model.dim * (model.is_f32 ? 4 : 2);
  for (void* cache : {region_.keys, region_.values}) {
    move_kv({static_cast<uint8_t*>(cache), region_.layer_stride, decoder_.layers(), model.kv_heads, region_.capacity,
             slot_bytes, slots_.data(), static_cast<int64_t>(path.size()), prefix});
  }
}

}  // namespace swiftspec::host
