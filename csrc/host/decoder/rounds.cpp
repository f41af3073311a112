#include "host/decoder/rounds.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "common/noise.h"
#include "host/decoder/rejection.h"
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

void Rounds::clear_rows() {
  tokens_.clear();
  positions_.clear();
  slots_.clear();
  mask_.clear();
  sequence_rows_.clear();
}

// Begins `rows` rows of a sequence, after the `tokens_` so far. Returns their mask [rows, width], all zero, which is
// valid until the next call.
uint8_t* Rounds::add_sequence(int64_t sequence, int64_t prefix, int64_t rows, int64_t width) {
  const size_t at = mask_.size();
  mask_.resize(at + static_cast<size_t>(rows * width));
  sequence_rows_.push_back({static_cast<int64_t>(tokens_.size()), rows, nullptr, width, prefix + width, sequence});
  return mask_.data() + at;
}

// Runs the rows of all sequences; logits of `logit_rows`, or for null of the rows from `logits_from` on.
void Rounds::forward(int64_t logits_from, const Nodes* logit_rows) {
  const auto rows = static_cast<int64_t>(tokens_.size());
  const auto with_logits = logit_rows == nullptr ? rows - logits_from : static_cast<int64_t>(logit_rows->size());
  const uint8_t* mask = mask_.data();
  for (SequenceRows& each : sequence_rows_) {
    each.mask = mask;
    mask += each.rows * each.width;
  }
  logits_.resize(static_cast<size_t>(with_logits * decoder_.model().head->n));
  const auto began = std::chrono::steady_clock::now();
  decoder_.forward({tokens_.data(),
                    positions_.data(),
                    slots_.data(),
                    rows,
                    sequence_rows_,
                    &cache_,
                    logits_from,
                    logits_.data(),
                    logit_rows});
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Combines the logits of the two sequences of a guided request.
void Rounds::combine_guided(const Verification& each) {
  const int64_t count = static_cast<int64_t>(each.tokens.size()) * decoder_.model().head->n;
  float* conditional = logits_.data() + each.row * decoder_.model().head->n;
  for (int64_t i = 0; i < count; ++i) {
    const float unconditional = conditional[count + i];
    conditional[i] = (conditional[i] - unconditional) * each.guidance->scale + unconditional;
  }
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

void Rounds::expand(std::vector<Expansion>& expansions) {
  clear_rows();
  Nodes logit_rows;
  for (Expansion& each : expansions) {
    add_leaves(each);
    for (auto row = tokens_.size() - each.expanded.size(); row < tokens_.size(); ++row) {
      logit_rows.push_back(static_cast<int64_t>(row));
    }
  }
  if (logit_rows.empty()) return;
  const auto rows = static_cast<int64_t>(tokens_.size()), with_logits = static_cast<int64_t>(logit_rows.size());
  forward(rows - with_logits, logit_rows.front() == rows - with_logits ? nullptr : &logit_rows);
  int64_t row = 0;
  auto logit_row = logit_rows.begin();
  for (const Expansion& each : expansions) {
    const auto count = static_cast<int64_t>(each.expanded.size());
    if (count == 0) continue;
    at_.assign(positions_.begin() + *logit_row, positions_.begin() + *logit_row + count);
    add_children(each, row);
    row += count;
    logit_row += count;
  }
}

// Takes the leaves of an expansion and adds their rows, after those of the pending tokens.
void Rounds::add_leaves(Expansion& each) {
  Tree& tree = *each.tree;
  const int64_t first = tree.expanded(), num_pending = static_cast<int64_t>(each.pending.size());
  each.expanded = tree.take_leaves(each.leaves);
  const auto count = static_cast<int64_t>(each.expanded.size());
  if (count == 0) return;
  const int64_t after = tree.expanded(), width = num_pending + after;
  uint8_t* mask = add_sequence(each.sequence, each.prefix, num_pending + count, width);
  for (int64_t i = 0; i < num_pending; ++i) {
    std::fill_n(mask + i * width, i + 1, uint8_t{1});
    tokens_.push_back(each.pending[static_cast<size_t>(i)]);
    slots_.push_back(each.prefix + i);
    positions_.push_back(each.prefix + i);
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* sees = tree.row(first + i);
    uint8_t* row = mask + (num_pending + i) * width;
    std::fill_n(row, num_pending, uint8_t{1});
    std::copy(sees, sees + after, row + num_pending);
    tokens_.push_back(tree.token[each.expanded[static_cast<size_t>(i)]]);
    slots_.push_back(each.prefix + num_pending + first + i);
    positions_.push_back(each.prefix + num_pending + std::count(sees, sees + after, uint8_t{1}) - 1);
  }
}

// Adds the children of the expanded leaves, whose logits begin at `row` and whose positions are in `at_`.
void Rounds::add_children(const Expansion& each, int64_t row) {
  if (each.sampled) return sample_children(each, row);
  Scoring& scoring = *each.scoring;
  const auto count = static_cast<int64_t>(each.expanded.size()), k = each.children;
  const int64_t stride = decoder_.model().head->n;
  float* logits = logits_.data() + row * stride;
  if (each.allowed) apply_token_mask(logits, count, scoring.columns(), each.allowed(each.expanded));
  sampled_.resize(static_cast<size_t>(count * k));
  values_.resize(sampled_.size());
  totals_.resize(static_cast<size_t>(count));
  const ScoreArgs scores = scoring.args(logits, stride, at_, each.coupled, each.tau);
  children(scores, k, sampled_.data(), values_.data(), merger_ ? totals_.data() : nullptr);
  if (merger_) (*merger_)(scoring.columns().first, count, k, sampled_.data(), values_.data(), totals_.data());
  each.tree->add_children(each.expanded, k, sampled_.data(), values_.data());
}

// As `add_children`, for children drawn from the draft's distribution after logits processing.
void Rounds::sample_children(const Expansion& each, int64_t row) {
  Scoring& scoring = *each.scoring;
  const SampledChildren& from = *each.sampled;
  const auto count = static_cast<int64_t>(each.expanded.size()), width = from.width;
  const int64_t stride = decoder_.model().head->n, k = std::min(each.children, width);
  float* logits = logits_.data() + row * stride;
  const TokenMask allowed = each.allowed ? each.allowed(each.expanded) : TokenMask{};
  const bool process = scoring.penalties || scoring.filter;
  if (process) {
    process_rows(logits, count, scoring, allowed,
                 [&](int64_t leaf) { return each.tree->path_tokens(each.expanded[static_cast<size_t>(leaf)]); });
  } else {
    apply_token_mask(logits, count, scoring.columns(), allowed);
  }
  ScoreArgs scores = scoring.args(process ? processed_.data() : logits, stride, at_, false, 1.0);
  if (process) scores.bias = nullptr;
  if (scoring.filter) {
    scores = gather_whole_rows(count, scoring);
    filter_scores(scores, *scoring.filter, merger_ ? whole_.data() : processed_.data());
    scores.temperature = 1.0f;
  }
  const bool merge = merger_ && !scoring.filter;
  sampled_.resize(static_cast<size_t>(count * width));
  values_.resize(sampled_.size());
  totals_.resize(static_cast<size_t>(count));
  children(scores, width, sampled_.data(), values_.data(), merge ? totals_.data() : nullptr);
  if (merge) {
    (*merger_)(scoring.columns().first, count, width, sampled_.data(), values_.data(), totals_.data());
    const int64_t last = scoring.columns().vocab - 1;  // a rank fills its list up if it has fewer tokens
    for (int64_t& token : sampled_) token = std::min(token, last);
  }
  drawn_.resize(static_cast<size_t>(count * k));
  weights_.resize(drawn_.size());
  for (int64_t leaf = 0; leaf < count; ++leaf) {
    const int64_t slot = each.tree->slot[each.expanded[static_cast<size_t>(leaf)]];
    from.draw(leaf, slot, sampled_.data() + leaf * width, values_.data() + leaf * width, k, drawn_.data() + leaf * k,
              weights_.data() + leaf * k);
  }
  each.tree->add_children(each.expanded, k, drawn_.data(), weights_.data());
}

// Adds the rows of a proposal in one sequence.
void Rounds::add_nodes(const Nodes& tokens, const Nodes& parents, int64_t sequence, int64_t prefix) {
  const auto count = static_cast<int64_t>(tokens.size());
  const size_t first = tokens_.size();
  uint8_t* mask = add_sequence(sequence, prefix, count, count);
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* row = mask + i * count;
    const int64_t parent = parents[static_cast<size_t>(i)];
    if (parent >= 0) std::copy_n(mask + parent * count, i, row);
    row[i] = 1;
    tokens_.push_back(tokens[static_cast<size_t>(i)]);
    slots_.push_back(prefix + i);
    positions_.push_back(parent < 0 ? prefix : positions_[first + static_cast<size_t>(parent)] + 1);
  }
}

void Rounds::verify(std::vector<Verification>& verifications) {
  clear_rows();
  for (Verification& each : verifications) {
    each.row = static_cast<int64_t>(tokens_.size());
    add_nodes(each.tokens, each.parents, each.sequence, each.prefix);
    if (!each.guidance) continue;
    const size_t root = tokens_.size();
    add_nodes(each.tokens, each.parents, each.guidance->sequence, each.guidance->prefix);
    tokens_[root] = each.guidance->root;
  }
  forward(0, nullptr);
  for (Verification& each : verifications) accept(each);
}

// Decides from the logits which nodes of a proposal are accepted.
void Rounds::accept(Verification& each) {
  if (each.guidance) combine_guided(each);
  at_.assign(positions_.begin() + each.row,
             positions_.begin() + each.row + static_cast<int64_t>(each.tokens.size()));
  if (each.drafted) {
    accept_drafted(each);
  } else if (each.forced) {
    draw_nodes(each);
    each.path = *each.forced;
    each.sampled.clear();
    for (size_t i = 1; i < each.path.size(); ++i) {
      each.sampled.push_back(each.tokens[static_cast<size_t>(each.path[i])]);
    }
    each.sampled.push_back(sampled_[static_cast<size_t>(each.path.back())]);
  } else {
    draw_nodes(each);
    match(each.tokens, each.parents, each.path, each.sampled);
  }
  Scoring& scoring = *each.scoring;
  if (scoring.penalties && each.sampled.back() >= 0) scoring.penalties->observe(each.sampled);
  commit(each.sequence, each.prefix, each.path);
  if (each.guidance) commit(each.guidance->sequence, each.guidance->prefix, each.path);
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

// Draws the token after each node into `sampled_`, from the logits of the last forward. `at_`: positions of the nodes.
void Rounds::draw_nodes(const Verification& each) {
  Scoring& scoring = *each.scoring;
  const auto count = static_cast<int64_t>(each.tokens.size());
  sampled_.resize(each.tokens.size());
  values_.resize(each.tokens.size());
  const bool process = each.allowed.bits != nullptr || scoring.penalties || scoring.filter;
  if (process) process_nodes(each, 0, count);
  if (scoring.filter) {
    keys_.clear();
    for (const int64_t position : at_) keys_.push_back(scoring.key(position));
    return draw_filtered(gather_whole_rows(count, scoring), *scoring.filter, keys_.data(), sampled_.data());
  }
  const int64_t stride = decoder_.model().head->n;
  const float* logits = process ? processed_.data() : logits_.data() + each.row * stride;
  ScoreArgs args = scoring.args(logits, stride, at_, scoring.noisy(), 1.0);
  if (process) args.bias = nullptr;
  draw(args, sampled_.data(), values_.data());
  if (merger_) (*merger_)(scoring.columns().first, count, 1, sampled_.data(), values_.data(), nullptr);
}

// Writes rows of logits with token mask, bias and penalties, this rank's columns, to `processed_`.
void Rounds::process_rows(const float* logits, int64_t rows, Scoring& scoring, const TokenMask& allowed,
                          const PathFn& path_of) {
  const int64_t stride = decoder_.model().head->n;
  const VocabShard columns = scoring.columns();
  processed_.assign(logits, logits + rows * stride);
  apply_token_mask(processed_.data(), rows, columns, allowed);
  for (int64_t row = 0; row < rows; ++row) {
    float* processed = processed_.data() + row * stride;
    add_bias(processed, columns, scoring.bias());
    if (scoring.penalties) scoring.penalties->apply(processed, columns, path_of(row));
  }
}

// The same for nodes of a proposal, from `node` on.
void Rounds::process_nodes(const Verification& each, int64_t node, int64_t count) {
  TokenMask allowed = each.allowed;
  if (allowed.bits != nullptr) allowed.bits += node * allowed.bytes;
  process_rows(logits_.data() + (each.row + node) * decoder_.model().head->n, count, *each.scoring, allowed,
               [&](int64_t row) {
                 Nodes path;
                 for (auto at = static_cast<size_t>(node + row); each.parents[at] >= 0;
                      at = static_cast<size_t>(each.parents[at])) {
                   path.push_back(each.tokens[at]);
                 }
                 return path;
               });
}

// Follows the accepted children down the tree. In a group all nodes are gathered at once; otherwise only those of the
// path are processed.
void Rounds::accept_drafted(Verification& each) {
  const Scoring& scoring = *each.scoring;
  const auto count = static_cast<int64_t>(each.tokens.size()), vocab = scoring.columns().vocab;
  const FilterArgs filter = scoring.filter.value_or(FilterArgs{0, 1.0f, 0.0f});
  scores_.resize(static_cast<size_t>(vocab));
  if (merger_) process_nodes(each, 0, count);
  const ScoreArgs gathered = merger_ ? gather_whole_rows(count, scoring) : ScoreArgs{};
  for (int64_t node = 0;;) {
    ScoreArgs scores = gathered;
    if (merger_) {
      scores.logits += node * scores.stride;
      scores.rows = 1;
    } else {
      process_nodes(each, node, 1);
      scores = gather_whole_rows(1, scoring);
    }
    filter_scores(scores, filter, scores_.data());
    const int64_t child = test_children(each, node);
    each.path.push_back(node);
    if (child < 0) break;
    each.sampled.push_back(each.tokens[static_cast<size_t>(child)]);
    node = child;
  }
  const int64_t position = at_[static_cast<size_t>(each.path.back())];
  const uint32_t key = noise::row_key(scoring.seed(), kResidualStream, static_cast<uint32_t>(position + 1));
  int64_t token = -1;
  draw_keyed({scores_.data(), nullptr, nullptr, nullptr, 1.0f, 1.0f, 1, vocab, vocab}, &key, &token, nullptr);
  each.sampled.push_back(token);
}

// Returns the accepted child of a node, or -1. If all are rejected, `scores_`, those of the target after this node,
// become the residual ones. A row that is not finite has no accepted child, and no token can be drawn from it.
int64_t Rounds::test_children(Verification& each, int64_t node) {
  const DraftProbs& drafted = *each.drafted;
  const int64_t at = drafted.rows[static_cast<size_t>(node)], vocab = each.scoring->columns().vocab;
  if (at < 0) return -1;
  bool finite = true;
  for (const float score : scores_) finite &= !std::isnan(score);
  int64_t best = 0;
  float top = 0.0f, total = 0.0f;
  children({scores_.data(), nullptr, nullptr, nullptr, 1.0f, 1.0f, 1, vocab, vocab}, 1, &best, &top, &total);
  if (!finite || !std::isfinite(top)) return -1;
  const int32_t* covered = drafted.tokens + at * drafted.width;
  const float* probs = drafted.probs + at * drafted.width;
  const auto width = static_cast<size_t>(drafted.width);
  p_.resize(width);
  q_.assign(probs, probs + width);
  for (size_t j = 0; j < width; ++j) p_[j] = std::exp(static_cast<double>(scores_[static_cast<size_t>(covered[j])] - total));
  const Nodes& siblings = drafted.children[static_cast<size_t>(node)];
  Nodes columns;
  for (const int64_t child : siblings) columns.push_back(drafted.columns[static_cast<size_t>(child)]);
  const auto position = static_cast<uint32_t>(at_[static_cast<size_t>(node)] + 1);
  const SiblingVerdict verdict =
      verify_siblings(p_, q_, columns, noise::row_key(each.scoring->seed(), kCoinStream, position));
  each.overlaps.push_back(verdict.overlap);
  if (verdict.accepted >= 0) return siblings[static_cast<size_t>(verdict.accepted)];
  for (size_t j = 0; j < width; ++j) {
    if (probs[j] <= 0.0f) continue;
    scores_[static_cast<size_t>(covered[j])] =
        static_cast<float>(std::log(p_[j]) - verdict.outside + static_cast<double>(total));
  }
  return -1;
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

void Rounds::copy_logits(const Nodes& rows, float* out) const {
  const int64_t stride = decoder_.model().head->n;
  for (const int64_t row : rows) {
    if ((row + 1) * stride > static_cast<int64_t>(logits_.size())) {
      throw std::invalid_argument("the proposal has more nodes than were verified");
    }
    out = std::copy_n(logits_.data() + row * stride, stride, out);
  }
}

std::vector<float> Rounds::probabilities(const Nodes& tokens, const Nodes& parents, const Scoring& scoring,
                                         int64_t row) {
  const auto count = static_cast<int64_t>(tokens.size()), stride = decoder_.model().head->n;
  if ((row + count) * stride > static_cast<int64_t>(logits_.size())) {
    throw std::invalid_argument("the proposal has more nodes than were verified");
  }
  constexpr float kUnknown = -std::numeric_limits<float>::infinity();
  totals_.assign(tokens.size(), kUnknown);
  std::vector<float> out;
  for (size_t i = 1; i < tokens.size(); ++i) {
    const float* logits = logits_.data() + (row + parents[i]) * stride;
    float& total = totals_[static_cast<size_t>(parents[i])];
    if (total == kUnknown) {
      int64_t best = 0;
      float value = 0.0F;
      children({logits, nullptr, nullptr, nullptr, 1.0F, 1.0F, 1, scoring.columns().count, stride}, 1, &best, &value,
               &total);
    }
    out.push_back(std::exp(logits[tokens[i]] - total));
  }
  return out;
}

void Rounds::commit(int64_t sequence, int64_t prefix, const Nodes& path) {
  moved_.clear();
  for (const int64_t node : path) moved_.push_back(prefix + node);
  cache_.move(sequence, moved_, prefix);
}

}  // namespace swiftspec::host
