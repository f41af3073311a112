#include "host/decoder/fast_reply.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "host/decoder/message_layout.h"

namespace swiftspec::host {

namespace {

bool matches(const FastReply& state, const Words& result) {
  return result.size() > kHeaderWords && result[kCount] >= 1 &&
         result.size() == kHeaderWords + kResultColumns * static_cast<std::size_t>(result[kCount]) &&
         result[kRequest] == state.request && result[kPrefixLen] == state.prefix_len;
}

}  // namespace

Words fast_reply(const FastReply& state, const Words& result) {
  if (!matches(state, result)) return {};
  const auto from = result.begin() + kHeaderWords + kResultTokens * result[kCount];
  const Nodes tokens(from, from + result[kCount]);
  const Nodes path = state.tree.walk(tokens);
  if (path.size() < tokens.size()) return {};
  const SubTree best = state.tree.best_subtree(state.bs, path.back());
  const auto count = static_cast<int32_t>(best.nodes.size());
  if (count < state.bs) return {};
  if (state.expansion_yield > 0.0 &&
      state.tree.expansion_pays(state.bs, state.w, state.steps, path.back(), state.expansion_yield)) {
    return {};
  }
  Words words(kHeaderWords + kProposalColumns * best.nodes.size());
  words[kRequest] = state.request;
  words[kRound] = result[kRound] + 1;
  words[kPrefixLen] = state.prefix_len + result[kCount];
  words[kCount] = count;
  const auto column = [&](ProposalColumn which) { return words.begin() + kHeaderWords + which * count; };
  const auto word = [](int64_t value) { return static_cast<int32_t>(value); };
  std::ranges::transform(best.tokens, column(kProposalTokens), word);
  std::ranges::transform(best.parents, column(kProposalParents), word);
  std::ranges::transform(best.weights, column(kProposalWeights), std::bit_cast<int32_t, float>);
  std::fill_n(column(kProposalSources), count, static_cast<int32_t>(NodeSource::kDraftModel));
  *column(kProposalSources) = static_cast<int32_t>(NodeSource::kRoot);
  return words;
}

}  // namespace swiftspec::host
