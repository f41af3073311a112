// The phases of a round as one call each: an expansion of the draft tree, and the verification of a proposal.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "host/decoder/decoder.h"
#include "host/decoder/merge.h"
#include "host/decoder/penalties.h"
#include "host/decoder/tree.h"

namespace swiftspec::host {

// Scores of one request's logits: temperature, bias, penalties, filters and position-keyed noise. Noise is generated in
// blocks of positions, since the nodes of a tree share few positions in consecutive rounds.
class Scoring {
 public:
  std::optional<Penalties> penalties;  // of verifications
  std::optional<FilterArgs> filter;    // the same

  // `bias`: of these columns, or null. `seed`, `stream`: of the noise, if `noisy`.
  Scoring(VocabShard columns, double temperature, const float* bias, bool noisy, uint64_t seed, uint32_t stream);

  bool noisy() const { return noisy_; }
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

// Computes the masks of these leaves; called before their forward.
using TokenMaskFn = std::function<TokenMask(const Nodes& leaves)>;

// The unconditional sequence of a guided request, which is the second one of the KV cache.
struct Guidance {
  int64_t root;    // its root token
  int64_t prefix;  // number of its verified tokens with KV
  float scale;
};

// Runs the rounds of one decoder on one sequence, or verifications of a guided request on two; buffers are allocated
// once. Slots before `prefix` hold verified tokens, the following ones the tree. The ranks of a group make the same
// calls, merge the best tokens of their logits and get the same result.
class Rounds {
 public:
  Rounds(Decoder& decoder, ModelCache cache);

  VocabShard columns(int64_t vocab) const;  // this rank's; throws std::invalid_argument if the head is too small

  // Adds the k likeliest children to each of the w likeliest leaves; `coupled` adds the noise of `scoring`, and tau
  // divides the scores. `pending`: verified tokens between prefix and root without KV, allowed only if the tree
  // consists of its root. `allowed` may be empty. Returns the number of expanded leaves.
  int64_t expand(Tree& tree, int64_t prefix, const Nodes& pending, int64_t w, int64_t k, Scoring& scoring, bool coupled,
                 double tau, const TokenMaskFn& allowed);

  // Draws the target's token after every node of a proposal and follows the drawn tokens down the tree. `path`: the
  // accepted nodes, root first, whose slots are moved to the end of the prefix; `sampled`: the token drawn after each,
  // which the penalties of `scoring` observe. With `guidance` every node runs in both sequences, and the guided logits
  // u + scale (c - u) take the place of the conditional ones c. With `forced`, a path of the proposal from its root,
  // these nodes are accepted instead, and `sampled` has their own tokens before the one drawn after the last of them.
  void verify(const Nodes& tokens, const Nodes& parents, int64_t prefix, const std::optional<Guidance>& guidance,
              Scoring& scoring, const TokenMask& allowed, const std::optional<Nodes>& forced, Nodes& path,
              Nodes& sampled);

  // Target probabilities of each node's token after its parent, root excluded, from the logits of the last
  // verification.
  std::vector<float> probabilities(const Nodes& tokens, const Nodes& parents, const Scoring& scoring);

  // The raw logits of these nodes of the last verification, this rank's columns: [nodes, outputs of the head].
  void copy_logits(const Nodes& nodes, float* out) const;

  double seconds() const { return seconds_; }  // of the last forward
  const Decoder& decoder() const { return decoder_; }
  const ModelCache& cache() const { return cache_; }

 private:
  SequenceRows rows_of(int64_t sequence, int64_t first, int64_t prefix, int64_t width) const;
  void forward(std::vector<SequenceRows> sequence_rows, int64_t logits_from);
  void forward_guided(int64_t prefix, const Guidance& guidance);
  void apply_token_mask(float* logits, int64_t rows, const VocabShard& columns, const TokenMask& allowed) const;
  void draw_nodes(const Nodes& tokens, const Nodes& parents, Scoring& scoring, const TokenMask& allowed);
  void match(const Nodes& tokens, const Nodes& parents, Nodes& path, Nodes& sampled) const;
  void process_rows(const Nodes& tokens, const Nodes& parents, Scoring& scoring, const TokenMask& allowed);
  ScoreArgs gather_whole_rows(int64_t rows, const Scoring& scoring);
  void commit(int64_t sequence, int64_t prefix, const Nodes& path);

  Decoder& decoder_;
  ModelCache cache_;
  std::optional<TopKMerger> merger_;  // set in a group
  Nodes tokens_, positions_, slots_, sampled_;
  std::vector<uint8_t> mask_;
  std::vector<float> logits_, values_, totals_;
  std::vector<float> processed_, gathered_, whole_;  // logits with mask, bias and penalties; those of all ranks
  std::vector<uint32_t> keys_;
  double seconds_ = 0.0;
};

}  // namespace swiftspec::host
