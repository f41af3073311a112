#include "host/decoder/fast_reply.h"

#include <bit>
#include <cstddef>

namespace swiftspec::host {

namespace {

// Header of both messages: request, round, prefix_len, count. Then a VerifyResult has path and tokens, a Proposal
// tokens, parents, weights and sources, `count` words each.
constexpr std::size_t kHeaderWords = 4;

// Sources of nodes: NodeSource in swiftspec/messages.py.
constexpr int32_t kRootSource = 0, kDraftModelSource = 1;

bool matches(const FastReply& state, const Words& result) {
  return result.size() > kHeaderWords && result[3] >= 1 &&
         result.size() == kHeaderWords + 2 * static_cast<std::size_t>(result[3]) &&
         result[0] == state.request && result[2] == state.prefix_len;
}

bool expansion_pays(const FastReply& state, int64_t root) {
  if (state.expansion_yield == 0.0) return false;
  const auto [tokens, leaves] = state.tree.prospects(state.bs, state.w, root);
  return state.expansion_yield * leaves > tokens / static_cast<double>(state.steps);
}

}  // namespace

Words fast_reply(const FastReply& state, const Words& result) {
  if (!matches(state, result)) return {};
  const Nodes tokens(result.end() - result[3], result.end());
  const Nodes path = state.tree.walk(tokens);
  if (path.size() < tokens.size()) return {};
  const SubTree best = state.tree.best_subtree(state.bs, path.back());
  const auto count = static_cast<int32_t>(best.nodes.size());
  if (count < state.bs || expansion_pays(state, path.back())) return {};
  Words words{state.request, result[1] + 1, state.prefix_len + result[3], count};
  for (const int64_t token : best.tokens) words.push_back(static_cast<int32_t>(token));
  for (const int64_t parent : best.parents) words.push_back(static_cast<int32_t>(parent));
  for (const float weight : best.weights) words.push_back(std::bit_cast<int32_t>(weight));
  words.push_back(kRootSource);
  words.insert(words.end(), best.nodes.size() - 1, kDraftModelSource);
  return words;
}

}  // namespace swiftspec::host
