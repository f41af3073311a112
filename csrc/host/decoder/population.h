// A round of particles, or of exact chains, as one call: K forwards of the draft, one of the target, what stays of the
// draft tokens, weights and resampling. As swiftspec/smc/round.py has it, of requests without filters
// and penalties.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "host/decoder/decoder.h"
#include "host/decoder/particles.h"

namespace swiftspec::host {

using Nodes = std::vector<int64_t>;

// One of the two models, with all sequences of its cache.
struct Side {
  Decoder& decoder;
  uint8_t *keys, *values;                         // of the first layer and sequence
  int64_t capacity, layer_stride, region_stride;  // slots of a region; bytes to the next layer, and sequence
};

// What becomes of draft tokens: all stay and are weighed, or chains are verified by plain decoding's draws, or by
// rejection (swiftspec/smc/chain_verification.py).
enum class Law : uint8_t { weigh, match, reject };

// Neighbouring groups whose requests shape logits alike. At temperature 0 there is no noise.
struct Span {
  int64_t groups;
  double temperature;
  const float* bias;  // [vocab], or null
};

// Told of each forward: whether it was the target's, its rows, and the seconds that it took.
using Told = std::function<void(bool target, int64_t rows, double seconds)>;

// Its buffers grow to the largest round.
class Population {
 public:
  // `deferred_bonus`: a round's last draft token is read with the token after it; else at once, by a forward of its own.
  Population(const Side& draft, const Side& target, const Particles& particles, Law law, double power,
             double threshold, bool deferred_bonus);

  // A round of the groups of these spans, which lie first. `head` [groups, 3 + text + width]: tokens of the common
  // prefix, or -1 where logits or weights are no numbers; finished rows; draft tokens that stay; row 0's tokens; the
  // columns of the first `width` slots.
  void round(const std::vector<Span>& spans, int64_t* head, int64_t width, const Told& told);

  const Particles& particles() const { return particles_; }
  const Side& side(bool target) const { return target ? target_ : draft_; }

 private:
  void look(int64_t groups);
  uint8_t* view(int64_t group, int64_t row);
  void open(int64_t rows);
  uint8_t* add(int64_t group, int64_t token, int64_t position, int64_t slot, int64_t row);
  void close(int64_t group, bool target);
  void forward(bool target, int64_t logits_from, std::vector<float>& logits, const Told& told);
  void read_tails(int64_t groups);
  void draft(const std::vector<Span>& spans, int64_t groups, const Told& told);
  void draw_drafts(const std::vector<Span>& spans, int64_t step, const float* logits);
  void draw_rows(const ScoreArgs& args, const Span& span, float* log_probs);
  void score(int64_t groups, const Told& told);
  void weigh(const Span& span, int64_t group);
  void match(const Span& span, int64_t group);
  void reject(const Span& span, int64_t group);
  void log_probs_of_drafts(const Span& span, int64_t group);
  int64_t residual(const Span& span, int64_t group, int64_t row, int64_t kept);
  void tell(int64_t group, int64_t width, int64_t* head) const;
  ScoreArgs scores(const Span& span, const float* logits, int64_t rows, bool target, double power = 1.0) const;
  const float* scored(int64_t group) const;  // [K + 1, N, outputs of the head]
  int64_t* drafts(int64_t group) { return drafts_.data() + group * particles_.count * particles_.steps; }
  uint32_t target_key(int64_t group, int64_t row, int64_t draw) const;

  Side draft_, target_;
  Particles particles_;
  Law law_;
  double power_, threshold_;
  bool deferred_;
  // rows of the forward that is being made
  Nodes tokens_, positions_, slots_;
  std::vector<uint8_t> mask_;
  std::vector<Part> parts_;
  // the round
  std::vector<uint8_t> views_;  // of each group [N, width]: the slots that its rows see so far
  Nodes views_of_, drawn_, drafts_;          // drafts_ [A, N, K]
  std::vector<uint32_t> keys_;
  std::vector<float> values_, log_q_;        // log_q_ [A, N, K]
  std::vector<std::vector<float>> drafted_;  // the draft's logits, by step; all in the first where nobody asks again
  std::vector<float> scored_;
  Verdict verdict_;
};

}  // namespace swiftspec::host
