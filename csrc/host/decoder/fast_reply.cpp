#include "host/decoder/fast_reply.h"

#include <cstddef>

namespace swiftspec::host {

namespace {

// request, round, prefix_len, count; then the path and the tokens, `count` each
constexpr std::size_t kHead = 4;

bool fits(const FastReply& ready, const Words& result) {
  return result.size() > kHead && result[3] >= 1 && result.size() == kHead + 2 * static_cast<std::size_t>(result[3]) &&
         result[0] == ready.request && result[2] == ready.prefix_len;
}

bool expansion_pays(const FastReply& ready, int64_t root) {
  if (ready.worth == 0.0) return false;
  const auto [tokens, leaves] = ready.tree.prospects(ready.bs, ready.w, root);
  return ready.worth * leaves > tokens / static_cast<double>(ready.steps);
}

}  // namespace

Words fast_reply(const FastReply& ready, const Words& result) {
  if (!fits(ready, result)) return {};
  const Nodes tokens(result.end() - result[3], result.end());
  const Nodes path = ready.tree.walk(tokens);
  if (path.size() < tokens.size()) return {};
  const SubTree best = ready.tree.best_subtree(ready.bs, path.back());
  const auto count = static_cast<int32_t>(best.nodes.size());
  if (count < ready.bs || expansion_pays(ready, path.back())) return {};
  Words words{ready.request, result[1] + 1, ready.prefix_len + result[3], count};
  for (const int64_t token : best.tokens) words.push_back(static_cast<int32_t>(token));
  for (const int64_t parent : best.parents) words.push_back(static_cast<int32_t>(parent));
  return words;
}

}  // namespace swiftspec::host
