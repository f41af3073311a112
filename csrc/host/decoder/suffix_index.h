// Suffix lookup: continuations of earlier occurrences of the latest tokens (prompt lookup decoding).
//
// Hash chains over positions, as in the match finders of LZ77 compressors: for each order n, the chain of a position
// leads to earlier positions whose last n tokens have the same hash. A token costs one entry per order.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace swiftspec::host {

// A tree of continuations without its root, by descending weight, so that parents come first. Node 0 is the root.
struct Continuations {
  std::vector<int32_t> tokens, parents;
  std::vector<int32_t> lengths;  // tokens before the node, its path included, that occur before the same token earlier
  std::vector<float> shares;     // share of the candidates of the parent, each with a vote of its length to the 4th
  std::vector<float> weights;    // log of the product of share and acceptance along the path
};

class SuffixIndex {
 public:
  static constexpr std::array<int64_t, 4> kOrders{16, 8, 4, 2};
  static constexpr int64_t kMaxLength = 64;      // of a match; longer ones count as this long
  static constexpr int64_t kMaxCandidates = 32;  // of a query
  static constexpr int64_t kMaxSteps = 64;       // of a query, along the chain of each order

  // `capacity`: tokens of all texts together, rounded up to a power of two; the oldest ones are evicted.
  explicit SuffixIndex(int64_t capacity);

  int64_t capacity() const { return mask_ + 1; }

  // Begins a text. No match crosses its border.
  void begin_text();

  // Appends tokens, which are not negative, to the latest text.
  void append(std::span<const int32_t> tokens);

  // The likeliest continuations, at most `max_nodes` nodes, of the latest text followed by the tokens of `path`.
  // `acceptance` [kMaxLength + 1]: probability that a continuation is right, by the length of its match.
  Continuations query(std::span<const int32_t> path, int64_t max_nodes, const float* acceptance);

 private:
  using Keys = std::array<uint64_t, kOrders.size()>;

  // An earlier occurrence: the position after it, and the length of the match before that position.
  struct Candidate {
    int64_t next, length;
  };

  int32_t at(int64_t position) const { return tokens_[static_cast<size_t>(position & mask_)]; }
  int64_t oldest() const { return end_ > capacity() ? end_ - capacity() : 0; }
  bool continues(int64_t next) const { return next < end_ && at(next) >= 0; }
  void add(int32_t token);
  void push(int32_t token);
  Keys keys(std::span<const int32_t> path) const;
  int64_t match_length(int64_t next, std::span<const int32_t> path) const;
  void add_chain(size_t order, uint64_t key, std::span<const int32_t> path, std::vector<Candidate>& found) const;
  std::vector<Candidate> candidates(std::span<const int32_t> path);

  int64_t mask_, bits_;
  int64_t end_ = 0;   // position after the latest token; positions are never used again
  int64_t text_ = 0;  // tokens of the latest text
  int64_t copy_ = -1, copy_length_ = 0;  // the position after the longest match, which later tokens extend; -1: none
  std::vector<int32_t> tokens_;          // by position modulo the capacity; negative: border of a text
  std::array<std::vector<uint32_t>, kOrders.size()> back_;  // distance to the previous position of the chain; 0: none
  std::array<std::vector<int64_t>, kOrders.size()> heads_;  // latest position + 1 of each chain; 0: none
};

}  // namespace swiftspec::host
