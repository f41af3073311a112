// A round of particles as one call: K draft forwards, one target forward, verification, weights and resampling. Same
// results as swiftspec/smc/round.py.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "host/decoder/decoder.h"
#include "host/decoder/particles.h"
#include "host/decoder/penalties.h"
#include "kernels_host.h"

namespace swiftspec::host {

// One of the two models with its caches.
struct ModelWithCache {
  Decoder& decoder;
  ModelCache cache;
};

// Consecutive groups whose requests share these parameters.
struct Span {
  int64_t groups;
  double temperature;
  const float* bias;                 // [vocab], or null
  std::optional<FilterArgs> filter;  // of the target
  std::optional<PenaltyArgs> penalties;
  int64_t min_tokens;  // the output has none of the suppressed tokens before this many

  // Whether logits depend on the preceding tokens.
  bool penalised() const { return penalties.has_value() || min_tokens > 0; }
};

// Called after each forward with the model, its rows and the duration in seconds.
using ForwardCallback = std::function<void(bool target, int64_t rows, double seconds)>;

// Buffers grow to the largest round.
class Population {
 public:
  // `deferred_bonus`: the last draft token of a round is prefilled together with the bonus token of that round;
  // otherwise immediately, in a forward of its own.
  Population(const ModelWithCache& draft, const ModelWithCache& target, const Particles& particles,
             double power, double threshold, bool deferred_bonus);

  // Runs a round of the first groups, which the spans cover. `summary` [groups, 2 + max_tokens + width] receives:
  // length of the common prefix, or -1 if logits or weights are not finite; finished rows; row 0's tokens; the states
  // of the first `width` slots.
  void round(const std::vector<Span>& spans, int64_t* summary, int64_t width, const ForwardCallback& on_forward);

  const Particles& particles() const { return particles_; }
  const ModelWithCache& side(bool target) const { return target ? target_ : draft_; }

 private:
  void init_views(int64_t groups);
  uint8_t* view(int64_t group, int64_t row);
  void begin_batch(int64_t rows);
  uint8_t* add_row(int64_t group, int64_t token, int64_t position, int64_t slot, int64_t row);
  void end_group(int64_t group);
  void forward(bool target, int64_t logits_from, std::vector<float>& logits, const ForwardCallback& on_forward);
  void add_pending_rows(int64_t groups);
  void draft(const std::vector<Span>& spans, int64_t groups, const ForwardCallback& on_forward);
  void draw_drafts(const std::vector<Span>& spans, int64_t step, float* logits);
  void init_penalties(const std::vector<Span>& spans, int64_t groups);
  void penalise(const Span& span, int64_t group, int64_t step, float* logits, int64_t stride);
  void process_target(const Span& span, int64_t group);
  void score(int64_t groups, const ForwardCallback& on_forward);
  void weigh_drafts(const Span& span, int64_t group);
  void weigh_kept_drafts(const Span& span, int64_t group);
  double log_normaliser(const Span& span, const float* logits);
  double log_mass_inside(const Span& span, const float* target, const float* draft);
  float log_total(const ScoreArgs& args);
  void log_probs_of_drafts(const Span& span, int64_t group);
  void write_summary(int64_t group, int64_t width, int64_t* summary) const;
  ScoreArgs scores(const Span& span, const float* logits, int64_t rows, bool target, double power = 1.0) const;
  float* target_logits(int64_t group);  // [K + 1, N, outputs of the head]
  const float* draft_logits(int64_t group, int64_t row, int64_t step) const;  // only if `keeps_logits_`
  int64_t* drafts(int64_t group) { return drafts_.data() + group * particles_.count * particles_.steps; }

  ModelWithCache draft_, target_;
  Particles particles_;
  double power_, threshold_;
  bool deferred_bonus_;
  // rows of the next forward
  Nodes tokens_, positions_, slots_;
  std::vector<uint8_t> mask_;
  std::vector<SequenceRows> sequence_rows_;
  // state of the round
  std::vector<uint8_t> views_;             // per group [N, width]: the slots that each row sees
  Nodes view_offsets_, sampled_, drafts_;  // drafts_ [groups, N, K]
  std::vector<uint32_t> keys_;
  std::vector<float> values_, log_q_;  // log_q_ [groups, N, K]
  // by draft step; only the first one is used unless the verification needs the logits of each step
  std::vector<std::vector<float>> draft_logits_;
  bool keeps_logits_ = false;
  std::vector<float> target_logits_, masked_;
  std::vector<std::optional<Penalties>> penalties_;  // [groups], of a round
  Nodes path_;                                       // the text of a row with its draft tokens
  Verdict verdict_;
};

}  // namespace swiftspec::host
