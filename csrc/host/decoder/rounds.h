// The phases of a round as one call each: an expansion of the draft tree, and the verification of a proposal.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "host/decoder/decoder.h"
#include "host/decoder/merge.h"
#include "host/decoder/penalties.h"
#include "host/decoder/sampled_children.h"
#include "host/decoder/tree.h"

namespace swiftspec::host {

// Scores of one request's logits: temperature, bias, penalties, filters and position-keyed noise. Noise is generated in
// blocks of positions, since the nodes of a tree share few positions in consecutive rounds.
class Scoring {
 public:
  // of verifications and of sampled children
  std::optional<Penalties> penalties;
  std::optional<FilterArgs> filter;

  // `bias`: of these columns, or null. `seed`, `stream`: of the noise, if `noisy`.
  Scoring(VocabShard columns, double temperature, const float* bias, bool noisy, uint64_t seed, uint32_t stream);

  bool noisy() const { return noisy_; }
  uint64_t seed() const { return seed_; }
  const float* bias() const { return bias_; }
  float temperature() const { return static_cast<float>(temperature_); }
  uint32_t key(int64_t position) const;  // of the noise of the token after this position
  VocabShard columns() const { return columns_; }

  // The arguments for rows of logits at `positions`. The noise of a row is that of the next position; without `noisy`
  // there is no noise. tau divides the scores including the noise.
  ScoreArgs args(const float* logits, int64_t stride, const std::vector<int64_t>& positions, bool noisy, double tau);

 private:
  void fill_noise(int64_t low, int64_t high);

  VocabShard columns_;
  double temperature_;
  const float* bias_;
  bool noisy_;
  uint64_t seed_;
  uint32_t stream_;
  int64_t begin_ = 0, end_ = 0;  // positions whose noise is in block_
  std::vector<float> block_;
  std::vector<int64_t> rows_;
};

// Token mask (a compiled grammar's constraint): one row of bits per row of logits, one bit per token, least significant
// bit first. Null allows all tokens.
struct TokenMask {
  const uint8_t* bits = nullptr;
  int64_t bytes = 0;  // per row
};

// The unverified tokens that precede the next token of a row.
using PathFn = std::function<Nodes(int64_t row)>;

// Computes the masks of these leaves; called after their forward.
using TokenMaskFn = std::function<TokenMask(const Nodes& leaves)>;

// The unconditional sequence of a guided request.
struct Guidance {
  int64_t sequence;  // index in the caches
  int64_t root;      // its root token
  int64_t prefix;    // number of its verified tokens with KV
  float scale;
};

// Adds `children` children to each of the likeliest `leaves` leaves of a tree: the likeliest, or `sampled` ones. Slots of
// its sequence before `prefix` hold verified tokens, the following ones the tree.
struct Expansion {
  Tree* tree;
  int64_t sequence, prefix;
  Nodes pending;  // verified tokens between prefix and root without KV, allowed only if the tree consists of its root
  int64_t leaves, children;
  Scoring* scoring;
  bool coupled;  // adds the noise of `scoring`
  double tau;    // divides the scores
  TokenMaskFn allowed{};
  std::optional<SampledChildren> sampled{};
  Nodes expanded{};  // result: the expanded leaves
};

// The distributions q that the children of a proposal were drawn from, one for each node that has children.
struct DraftProbs {
  int64_t width;                  // tokens that a distribution covers
  const int32_t* tokens;          // [nodes with children, width]
  const float* probs;             // the same
  Nodes rows{};                   // by node: its distribution; -1 without children
  std::vector<Nodes> children{};  // by node
  Nodes columns{};                // by node: of its token in the distribution of its parent
};

// Draws the target's token after every node of a proposal and follows the drawn tokens down the tree. With `guidance`
// every node runs in both sequences, and the guided logits u + scale (c - u) take the place of the conditional ones c.
// With `forced`, a path of the proposal from its root, these nodes are accepted instead, and `sampled` has their own
// tokens before the one drawn after the last of them. With `drafted` the children are accepted by rejection sampling.
struct Verification {
  Nodes tokens, parents;
  int64_t sequence, prefix;
  Scoring* scoring;
  TokenMask allowed{};
  std::optional<Guidance> guidance{};
  std::optional<Nodes> forced{};
  std::optional<DraftProbs> drafted{};
  Nodes path{};     // result: the accepted nodes, root first, whose slots are moved to the end of the prefix
  Nodes sampled{};  // result: the token drawn after each, which the penalties of `scoring` observe
  std::vector<double> overlaps{};  // result: see `SiblingVerdict`, for each node of the path that has drafted children
  int64_t row = 0;  // result: the row of logits of its root; those of the other nodes follow
};

// Runs the rounds of one decoder on the sequences of its caches, of one request or of several at a time, each with its
// own tree, scoring and sequence; buffers grow to the largest forward. The ranks of a group make the same calls, merge
// the best tokens of their logits and get the same result.
class Rounds {
 public:
  Rounds(Decoder& decoder, ModelCache cache);

  VocabShard columns(int64_t vocab) const;  // this rank's; throws std::invalid_argument if the head is too small

  // Expands all trees in one forward.
  void expand(std::vector<Expansion>& expansions);

  // Verifies all proposals in one forward.
  void verify(std::vector<Verification>& verifications);

  // Target probabilities of each node's token after its parent, root excluded, from the logits of the last
  // verification, in which the root of the proposal had this row.
  std::vector<float> probabilities(const Nodes& tokens, const Nodes& parents, const Scoring& scoring, int64_t row);

  // The raw logits of these rows of the last verification, this rank's columns: [rows, outputs of the head].
  void copy_logits(const Nodes& rows, float* out) const;

  double seconds() const { return seconds_; }  // of the last forward
  const Decoder& decoder() const { return decoder_; }
  const ModelCache& cache() const { return cache_; }

 private:
  void clear_rows();
  uint8_t* add_sequence(int64_t sequence, int64_t prefix, int64_t rows, int64_t width);
  void add_leaves(Expansion& each);
  void add_nodes(const Nodes& tokens, const Nodes& parents, int64_t sequence, int64_t prefix);
  void forward(int64_t logits_from, const Nodes* logit_rows);
  void combine_guided(const Verification& each);
  void add_children(const Expansion& each, int64_t row);
  void sample_children(const Expansion& each, int64_t row);
  void accept(Verification& each);
  void apply_token_mask(float* logits, int64_t rows, const VocabShard& columns, const TokenMask& allowed) const;
  void draw_nodes(const Verification& each);
  void match(const Nodes& tokens, const Nodes& parents, Nodes& path, Nodes& sampled) const;
  void accept_drafted(Verification& each);
  int64_t test_children(Verification& each, int64_t node);
  void process_nodes(const Verification& each, int64_t node, int64_t count);
  void process_rows(const float* logits, int64_t rows, Scoring& scoring, const TokenMask& allowed,
                    const PathFn& path_of);
  ScoreArgs gather_whole_rows(int64_t rows, const Scoring& scoring);
  void commit(int64_t sequence, int64_t prefix, const Nodes& path);

  Decoder& decoder_;
  ModelCache cache_;
  std::optional<TopKMerger> merger_;  // set in a group
  Nodes tokens_, positions_, slots_, sampled_;
  Nodes at_, moved_;  // positions of the rows of one request; slots of an accepted path
  std::vector<SequenceRows> sequence_rows_;
  std::vector<uint8_t> mask_;  // of all sequences
  std::vector<float> logits_, values_, totals_;
  std::vector<float> processed_, gathered_, whole_;  // logits with mask, bias and penalties; those of all ranks
  std::vector<float> scores_;  // of one node, all columns, without noise
  Nodes drawn_;  // sampled children
  std::vector<double> weights_, p_, q_;
  std::vector<uint32_t> keys_;
  double seconds_ = 0.0;
};

}  // namespace swiftspec::host
