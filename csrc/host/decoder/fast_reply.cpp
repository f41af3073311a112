#include "host/decoder/fast_reply.h"

#include <cstddef>

namespace swiftspec::host {

namespace {

// request, round, prefix_len, count; then the path and the tokens, `count` each
constexpr std::size_t kHead = 4;

bool fits(const Offer& offer, const Words& result) {
  return result.size() > kHead && result[3] >= 1 && result.size() == kHead + 2 * static_cast<std::size_t>(result[3]) &&
         result[0] == offer.request && result[2] == offer.prefix_len;
}

bool expansion_pays(const Offer& offer, int64_t root) {
  if (offer.worth == 0.0) return false;
  const auto [tokens, leaves] = offer.tree.prospects(offer.bs, offer.w, root);
  return offer.worth * leaves > tokens / static_cast<double>(offer.steps);
}

}  // namespace

Words answer(const Offer& offer, const Words& result) {
  if (!fits(offer, result)) return {};
  const Nodes tokens(result.end() - result[3], result.end());
  const Nodes path = offer.tree.walk(tokens);
  if (path.size() < tokens.size()) return {};
  const SubTree best = offer.tree.best_subtree(offer.bs, path.back());
  const auto count = static_cast<int32_t>(best.nodes.size());
  if (count < offer.bs || expansion_pays(offer, path.back())) return {};
  Words words{offer.request, result[1] + 1, offer.prefix_len + result[3], count};
  for (const int64_t token : best.tokens) words.push_back(static_cast<int32_t>(token));
  for (const int64_t parent : best.parents) words.push_back(static_cast<int32_t>(parent));
  return words;
}

}  // namespace swiftspec::host
