#include "host/decoder/suffix_index.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <queue>

namespace swiftspec::host {

namespace {

constexpr int32_t kBorder = -1;
constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15u;  // 2^64 divided by the golden ratio

// A node that is not yet part of the result, with the candidates that continue with it.
struct Open {
  double weight, share;
  int64_t order;  // of two equal weights the earlier node comes first
  int32_t token, parent;
  int64_t length, depth;
  std::vector<size_t> members;  // indices of candidates, the longest match first
};

struct Later {
  bool operator()(const Open& a, const Open& b) const {
    return a.weight != b.weight ? a.weight < b.weight : a.order > b.order;
  }
};

// So steep that one long match outweighs many short ones.
double vote(int64_t length) { return static_cast<double>(length * length * length * length); }

}  // namespace

SuffixIndex::SuffixIndex(int64_t capacity)
    : mask_(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(capacity, 2)))) - 1),
      bits_(std::countr_one(static_cast<uint64_t>(mask_))),
      tokens_(static_cast<size_t>(mask_ + 1), kBorder) {
  for (auto& back : back_) back.resize(tokens_.size());
  for (auto& heads : heads_) heads.resize(tokens_.size());
}

void SuffixIndex::begin_text() {
  if (text_ > 0) push(kBorder);
  text_ = 0;
  copy_ = -1;
}

void SuffixIndex::append(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) add(token);
}

void SuffixIndex::push(int32_t token) {
  tokens_[static_cast<size_t>(end_ & mask_)] = token;
  ++end_;
}

void SuffixIndex::add(int32_t token) {
  const bool goes_on = copy_ >= oldest() && at(copy_) == token;
  copy_ = goes_on ? copy_ + 1 : -1;
  copy_length_ += goes_on ? 1 : -copy_length_;
  push(token);
  ++text_;
  const Keys found = keys({});
  const int64_t position = end_ - 1;
  for (size_t order = 0; order < kOrders.size(); ++order) {
    if (text_ < kOrders[order]) continue;
    int64_t& head = heads_[order][found[order]];
    const int64_t distance = head == 0 ? 0 : position - (head - 1);
    back_[order][static_cast<size_t>(position & mask_)] =
        distance > mask_ ? 0 : static_cast<uint32_t>(distance);  // 0 also if the previous position is evicted
    head = position + 1;
  }
}

// The chain of each order that the latest text, followed by `path`, belongs to. Those of orders above its length are
// undefined.
SuffixIndex::Keys SuffixIndex::keys(std::span<const int32_t> path) const {
  Keys found{};
  const int64_t more = static_cast<int64_t>(path.size()), length = std::min(text_, capacity()) + more;
  uint64_t hash = 0;
  int64_t order = static_cast<int64_t>(kOrders.size()) - 1;
  for (int64_t i = 0; i < kOrders[0] && i < length; ++i) {
    const int32_t token = i < more ? path[static_cast<size_t>(more - 1 - i)] : at(end_ - 1 - (i - more));
    hash = (hash + static_cast<uint64_t>(token) + 1) * kMultiplier;
    hash ^= hash >> 29;
    if (i + 1 == kOrders[static_cast<size_t>(order)]) {
      found[static_cast<size_t>(order)] = (hash * kMultiplier) >> (64 - bits_);
      --order;
    }
  }
  return found;
}

// The number of tokens before `next` that equal the last ones of the latest text followed by `path`.
int64_t SuffixIndex::match_length(int64_t next, std::span<const int32_t> path) const {
  const int64_t more = static_cast<int64_t>(path.size()), first = oldest();
  const int64_t limit = std::min({kMaxLength, text_ + more, end_ - first + more, next - first});
  int64_t length = 0;
  while (length < limit) {
    const int32_t token =
        length < more ? path[static_cast<size_t>(more - 1 - length)] : at(end_ - 1 - (length - more));
    if (at(next - 1 - length) != token) break;
    ++length;
  }
  return length;
}

// Adds candidates of one order, except those that a higher order finds.
void SuffixIndex::add_chain(size_t order, uint64_t key, std::span<const int32_t> path,
                            std::vector<Candidate>& found) const {
  const int64_t longest = order == 0 ? kMaxLength + 1 : kOrders[order - 1], first = oldest();
  int64_t position = heads_[order][key] - 1;
  for (int64_t step = 0; step < kMaxSteps && position >= first; ++step) {
    if (static_cast<int64_t>(found.size()) == kMaxCandidates) return;
    const int64_t next = position + 1;
    if (continues(next) && next != (found.empty() ? -1 : found[0].next)) {
      const int64_t length = match_length(next, path);
      if (length >= kOrders[order] && length < longest) found.push_back({next, length});
    }
    const uint32_t distance = back_[order][static_cast<size_t>(position & mask_)];
    if (distance == 0) return;
    position -= distance;
  }
}

// Earlier occurrences, the longest match first, of equal ones the latest.
std::vector<SuffixIndex::Candidate> SuffixIndex::candidates(std::span<const int32_t> path) {
  const int64_t more = static_cast<int64_t>(path.size());
  std::vector<Candidate> found;
  found.reserve(static_cast<size_t>(kMaxCandidates));
  if (copy_ >= oldest() && continues(copy_ + more)) {
    int64_t same = 0;
    while (same < more && at(copy_ + same) == path[static_cast<size_t>(same)]) ++same;
    if (same == more) found.push_back({copy_ + more, copy_length_ + more});
  }
  const Keys chains = keys(path);
  for (size_t order = 0; order < kOrders.size(); ++order) {
    if (std::min(text_, capacity()) + more >= kOrders[order]) add_chain(order, chains[order], path, found);
  }
  std::ranges::sort(found, [](const Candidate& a, const Candidate& b) {
    return a.length != b.length ? a.length > b.length : a.next > b.next;
  });
  if (more == 0 && !found.empty() && (copy_ < 0 || found[0].length > copy_length_)) {
    copy_ = found[0].next;
    copy_length_ = found[0].length;
  }
  return found;
}

Continuations SuffixIndex::query(std::span<const int32_t> path, int64_t max_nodes, const float* acceptance) {
  const std::vector<Candidate> found = candidates(path);
  std::priority_queue<Open, std::vector<Open>, Later> open;
  int64_t opened = 0;
  // Adds the children of a node: groups its candidates by their token at `depth`.
  const auto add_children = [&](int32_t parent, double weight, int64_t depth, const std::vector<size_t>& members) {
    std::vector<Open> children;
    double votes = 0;
    for (const size_t member : members) {
      const int64_t position = found[member].next + depth;
      if (!continues(position)) continue;
      const int64_t length = std::min(found[member].length + depth, kMaxLength);
      const int32_t token = at(position);
      auto child = std::ranges::find(children, token, &Open::token);
      if (child == children.end()) {
        children.push_back({0, 0, opened++, token, parent, length, depth, {}});
        child = children.end() - 1;
      }
      child->share += vote(length);
      child->members.push_back(member);
      votes += vote(length);
    }
    for (Open& child : children) {
      child.share /= votes;
      const double chance = std::clamp(static_cast<double>(acceptance[child.length]) * child.share, 1e-9, 1.0);
      child.weight = weight + std::log(chance);
      open.push(std::move(child));
    }
  };
  std::vector<size_t> all(found.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = i;
  add_children(0, 0.0, 0, all);
  Continuations result;
  while (!open.empty() && static_cast<int64_t>(result.tokens.size()) < max_nodes) {
    const Open best = open.top();
    open.pop();
    result.tokens.push_back(best.token);
    result.parents.push_back(best.parent);
    result.lengths.push_back(static_cast<int32_t>(best.length));
    result.shares.push_back(static_cast<float>(best.share));
    result.weights.push_back(static_cast<float>(best.weight));
    add_children(static_cast<int32_t>(result.tokens.size()), best.weight, best.depth + 1, best.members);
  }
  return result;
}

}  // namespace swiftspec::host
