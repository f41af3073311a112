// Bias and penalties on rows of logits: the steps of logits processing before temperature and filters.
#pragma once

#include <cstdint>
#include <vector>

namespace swiftspec::host {

using Nodes = std::vector<int64_t>;

// The columns of the vocabulary whose logits a rank computes: `count` of all `vocab` columns, from `first` on. Without
// a group these are all columns.
struct VocabShard {
  int64_t first, count, vocab;
};

// Adds the bias [count] of these columns to a row of logits; null adds nothing.
void add_bias(float* logits, const VocabShard& shard, const float* bias);

struct PenaltyArgs {
  float repetition, presence, frequency;
};

// Repetition, presence and frequency penalty of one request, with the counts of the verified output's tokens.
class Penalties {
 public:
  Penalties(int64_t vocab, const PenaltyArgs& args, const Nodes& prompt, const Nodes& output);

  void observe(const Nodes& tokens);  // adds verified output tokens

  // Applies the penalties to a row of logits in place. The row has the columns `shard`; `path`: unverified tokens that
  // precede the row's next token.
  void apply(float* logits, const VocabShard& shard, const Nodes& path);

 private:
  void count(int64_t token);

  PenaltyArgs args_;
  std::vector<uint8_t> in_prompt_;  // [vocab]
  std::vector<int32_t> counts_;     // [vocab], of the output
  Nodes seen_;                      // tokens of prompt or output
};

}  // namespace swiftspec::host
