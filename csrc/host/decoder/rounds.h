// The inner part of a round as one call: an expansion of the draft tree, and the verification of a proposal.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "host/decoder/decoder.h"
#include "host/decoder/merge.h"
#include "host/decoder/tree.h"

namespace swiftspec::host {

// The tokens of a vocabulary whose logits a rank has: without a group all of them, none where it ends before.
struct Columns {
  int64_t first, count, vocab;
};

// What makes tokens of one request's logits. The noise is of its own seed and stream, made in blocks: the nodes of
// a tree share a few positions, round after round.
class Scoring {
 public:
  // bias: of these columns, or null.
  Scoring(Columns columns, double temperature, const float* bias, bool noisy, uint64_t seed, uint32_t stream);

  bool noisy() const { return noisy_; }
  Columns columns() const { return columns_; }

  // For rows of logits at `positions`, whose noise is that of the position after; without `noisy` there is none.
  // tau divides the scores, noise and all.
  ScoreArgs args(const float* logits, int64_t stride, const std::vector<int64_t>& positions, bool noisy, double tau);

 private:
  void cover(int64_t low, int64_t high);

  Columns columns_;
  double temperature_;
  const float* bias_;
  bool noisy_;
  uint64_t seed_;
  uint32_t stream_;
  int64_t begin_ = 0, end_ = 0;  // positions that the block has noise of
  std::vector<float> block_;
  std::vector<int64_t> rows_;
};

// Which tokens may follow: a row of bits for each row of logits, a bit for each token of the vocabulary, the lowest of
// a byte first. Null: all of them.
struct Allowed {
  const uint8_t* bits = nullptr;
  int64_t bytes = 0;  // of a row
};

// What may follow each of these leaves; called before their forward.
using AllowedAfter = std::function<Allowed(const Nodes& leaves)>;

// One sequence's region of a cache.
struct Region {
  void *keys, *values;  // of the first layer
  int64_t capacity, layer_stride;
};

// Runs one decoder's rounds in one region, on buffers that are made once. Slots up to `prefix` hold verified tokens,
// the tree's come after them. The ranks of a group make the same calls, exchange the best of their columns of the
// logits and come to the same result.
class Rounds {
 public:
  Rounds(Decoder& decoder, const Region& region);

  Columns columns(int64_t vocab) const;  // this rank's; throws std::invalid_argument where the head is smaller

  // Expands the w likeliest leaves into their k likeliest children each, `coupled` under the noise of `scoring`; tau
  // divides the scores. `pending`: verified tokens between prefix and root that have no KV yet; only where the root
  // is all there is. Without `allowed` any token may follow. Returns how many leaves it expanded.
  int64_t expand(Tree& tree, int64_t prefix, const Nodes& pending, int64_t w, int64_t k, Scoring& scoring, bool coupled,
                 double tau, const AllowedAfter& allowed);

  // Draws the target's token after every node of a proposal and walks down while that is a child. `path`: the
  // nodes, the root first, whose slots are moved to the end of the prefix; `sampled`: the token drawn after each.
  void verify(const Nodes& tokens, const Nodes& parents, int64_t prefix, Scoring& scoring, const Allowed& allowed,
              Nodes& path, Nodes& sampled);

  // What the logits of the last verification, of these nodes, give each token after its parent, the root left out.
  std::vector<float> probabilities(const Nodes& tokens, const Nodes& parents, const Scoring& scoring);

  double seconds() const { return seconds_; }  // that the last forward took
  const Decoder& decoder() const { return decoder_; }
  const Region& region() const { return region_; }

 private:
  void forward(int64_t prefix, int64_t width, int64_t logits_from);
  void forbid(int64_t rows, const Columns& columns, const Allowed& allowed);
  void commit(int64_t prefix, const Nodes& path);

  Decoder& decoder_;
  Region region_;
  std::optional<Merge> merge_;  // in a group
  Nodes tokens_, positions_, slots_, drawn_;
  std::vector<uint8_t> mask_;
  std::vector<float> logits_, values_, totals_;
  double seconds_ = 0.0;
};

}  // namespace swiftspec::host
