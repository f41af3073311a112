// Sequence groups of particles on the tensors of swiftspec/smc (particles.py, noise_streams.py and group_requests.py
// document them), and their updates in a round.
#pragma once

#include <cstdint>
#include <vector>

namespace swiftspec::host {

// The state of one particle, a row of each tensor. After the fan-out both tail tokens are the last prompt token.
struct Particle {
  uint8_t* mask;  // [slots]
  uint8_t *finished, *stopped;
  int64_t* length;
  int64_t *tail_tokens, *tail_slots, *tail_positions;  // [2], the last tokens, whose draft KV is missing
  int64_t* tokens;                                     // [max_tokens]
};

// The result of verifying a group's draft tokens; N rows.
struct Verdict {
  std::vector<int64_t> num_accepted;  // leading draft tokens that are accepted
  std::vector<int64_t> bonus;         // the token after them; -1 if logits are not finite
  std::vector<double> terms;          // [N, K + 1], log-weight of each token
};

// G groups of N rows, K draft tokens per round.
struct Particles {
  int64_t groups, count, steps;
  int64_t slots, max_tokens;  // slots of a group's tree region; capacity of a row, in tokens
  int64_t max_rounds;         // columns of `resampling`; the last one is for the final pick
  int64_t vocab;
  uint8_t* mask;                  // [G, N, slots]
  uint8_t* ends;                  // [G, N, 2]
  int64_t* path;                  // [G, N, kHeaderWords + max_tokens]
  double* log_weights;            // [G, N]
  int64_t *base, *clock, *limit;  // [G]
  double *log_z, *ess;            // [G]
  int64_t *resampled, *rounds;    // [G]
  const uint32_t* keys;           // [G, kPurposes, N]
  const double* resampling;       // [G, max_rounds]
  int64_t *prefix, *sequences;    // [G]
  const uint8_t* stops;           // [G, vocab]
  const uint8_t* prompts;         // [G, vocab], the tokens of the prompt
  const uint8_t* suppressed;      // [G, vocab], the tokens that `min_tokens` excludes

  static constexpr int64_t kHeaderWords = 7, kPurposes = 3, kDraft = 0, kBonus = 1;

  Particle row(int64_t group, int64_t row) const;
  int64_t slots_per_round() const { return count * (steps + 1); }  // of one group
  // Width of the mask, including the next round.
  int64_t width(int64_t group) const { return base[group] + slots_per_round(); }
  int64_t slot(int64_t group, int64_t row, int64_t step) const { return base[group] + step * count + row; }
  uint32_t key(int64_t group, int64_t purpose, int64_t row, int64_t draw) const;
  int64_t pending_slot(int64_t group, int64_t row) const;          // a finished row uses a new slot of its own

  // Appends a round to every unfinished row: the accepted prefix of `drafts` [N, K], then the bonus token.
  void append_round(int64_t group, const int64_t* drafts, const Verdict& verdict) const;

  // Resamples if the effective sample size is below `threshold` * N. The uniform random number is that of the round in
  // `resampling`, or `uniform`.
  void resample(int64_t group, double threshold) const;
  void resample(int64_t group, double threshold, double uniform) const;

  // Length of the common prefix of all rows.
  int64_t common_prefix(int64_t group) const;

  // Classifies each of the first `width` tree slots. Slots of tail tokens are never kShared.
  void classify_slots(int64_t group, int64_t width, int64_t* out) const;

  // Follows a KV compaction: the first `promoted` slots joined the prefix, slots `surviving` become 0, 1, ...
  void compact(int64_t group, int64_t promoted, const std::vector<int64_t>& surviving) const;

  enum SlotState : int64_t { kDead, kLive, kShared };

 private:
  void append(int64_t group, const Particle& p, const int64_t* drafts, int64_t kept, int64_t bonus,
              const double* terms, double& weight) const;
  void copy(int64_t group, int64_t from, int64_t to) const;
};

}  // namespace swiftspec::host
