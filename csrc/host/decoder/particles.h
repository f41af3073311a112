// Groups of particles, in the tensors where swiftspec/smc/particles.py, streams.py and round.py keep them, and what a
// round changes of them. See there for what they hold.
#pragma once

#include <cstdint>
#include <vector>

namespace swiftspec::host {

// One row. At the fan-out both tokens of the tail are the prompt's last.
struct Particle {
  uint8_t* mask;          // [slots]
  uint8_t *finished, *stopped;
  int64_t* length;
  int64_t *tail_tokens, *tail_slots, *tail_positions;  // [2]: those that the draft has no KV of
  int64_t* tokens;        // [text]
};

// What became of a group's draft tokens: N rows.
struct Verdict {
  std::vector<int64_t> kept;   // how many leading ones stay
  std::vector<int64_t> extra;  // the token after them; -1: logits that are no numbers
  std::vector<double> terms;   // [N, K + 1]: log-weights by place
};

// G groups of N rows, K draft tokens a round.
struct Particles {
  int64_t groups, count, steps;
  int64_t slots, text;      // of the tree's region in each group; tokens that a row has room for
  int64_t rounds_known;     // of which `resampling` has the number; the last one is for the pick
  int64_t streams;          // keys of each purpose, at least N
  int64_t vocab;
  uint8_t* mask;            // [G, N, slots]
  uint8_t* ends;            // [G, N, 2]
  int64_t* path;            // [G, N, kHead + text]
  double* log_weights;      // [G, N]
  int64_t *base, *clock, *limit;  // [G]
  double *log_z, *ess;      // [G]
  int64_t *resampled, *rounds;    // [G]
  const uint32_t* keys;     // [G, kPurposes, streams]
  const uint32_t* target;   // [G]
  const double* resampling; // [G, rounds_known]
  int64_t *prefix, *sequences;  // [G]
  const uint8_t* stops;     // [G, vocab]

  static constexpr int64_t kHead = 7, kPurposes = 4, kDraft = 0, kExtra = 1, kCoin = 2;

  Particle row(int64_t group, int64_t row) const;
  int64_t handed_out() const { return count * (steps + 1); }               // slots of a group's round
  int64_t width(int64_t group) const { return base[group] + handed_out(); }  // of the window, with these
  int64_t slot(int64_t group, int64_t row, int64_t step) const { return base[group] + step * count + row; }
  uint32_t key(int64_t group, int64_t purpose, int64_t row, int64_t draw) const;
  double uniform(int64_t group, int64_t row, int64_t draw) const;  // a coin
  int64_t pending_slot(int64_t group, int64_t row) const;          // a finished row has a new one of its own

  // Appends a round to every row that is not finished: `drafts` [N, K] as far as they stay, then the extra token.
  void take(int64_t group, const int64_t* drafts, const Verdict& verdict) const;

  // Where the effective sample size is below `threshold` N; by the round's number of `resampling`, or by another one.
  void resample(int64_t group, double threshold) const;
  void resample(int64_t group, double threshold, double uniform) const;

  // How many leading tokens all rows share.
  int64_t common(int64_t group) const;

  // For each of the first `width` tree slots what it is; a token of somebody's tail is never shared.
  void columns(int64_t group, int64_t width, int64_t* out) const;

  // The first `promoted` slots have gone to the prefix, and `keep` become slots 0, 1, ...
  void compact(int64_t group, int64_t promoted, const std::vector<int64_t>& keep) const;

  enum Column : int64_t { kDead, kLive, kShared };

 private:
  void append(int64_t group, const Particle& p, const int64_t* drafts, int64_t kept, int64_t extra,
              const double* terms, double& weight) const;
  void copy(int64_t group, int64_t from, int64_t to) const;
};

}  // namespace swiftspec::host
