#include "host/decoder/penalties.h"

#include <cstddef>

namespace swiftspec::host {

void add_bias(float* logits, const VocabShard& shard, const float* bias) {
  if (bias == nullptr) return;
  for (int64_t column = 0; column < shard.count; ++column) logits[column] += bias[column];
}

Penalties::Penalties(int64_t vocab, const PenaltyArgs& args, const Nodes& prompt, const Nodes& output)
    : args_(args), in_prompt_(static_cast<size_t>(vocab)), counts_(static_cast<size_t>(vocab)) {
  for (const int64_t token : prompt) {
    uint8_t& found = in_prompt_[static_cast<size_t>(token)];
    if (found == 0) seen_.push_back(token);
    found = 1;
  }
  observe(output);
}

void Penalties::count(int64_t token) {
  const auto at = static_cast<size_t>(token);
  if (counts_[at]++ == 0 && in_prompt_[at] == 0) seen_.push_back(token);
}

void Penalties::observe(const Nodes& tokens) {
  for (const int64_t token : tokens) count(token);
}

void Penalties::apply(float* logits, const VocabShard& shard, const Nodes& path) {
  const size_t verified = seen_.size();
  observe(path);
  for (const int64_t token : seen_) {
    const int64_t column = token - shard.first;
    if (column < 0 || column >= shard.count) continue;
    float& logit = logits[column];
    const auto times = static_cast<float>(counts_[static_cast<size_t>(token)]);
    logit = logit > 0.0f ? logit / args_.repetition : logit * args_.repetition;
    logit = logit - args_.frequency * times - (times > 0.0f ? args_.presence : 0.0f);
  }
  for (const int64_t token : path) --counts_[static_cast<size_t>(token)];
  seen_.resize(verified);
}

}  // namespace swiftspec::host
