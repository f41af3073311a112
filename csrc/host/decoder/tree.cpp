#include "host/decoder/tree.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace swiftspec::host {

namespace {

// The best `most` of nodes 0 .. count - 1 with a finite weight, in node order.
template <class Weight>
Nodes best(int64_t count, int64_t most, const Weight& weight) {
  constexpr double kNegInf = -std::numeric_limits<double>::infinity();
  Nodes nodes;
  for (int64_t i = 0; i < count; ++i) {
    if (weight(i) > kNegInf) nodes.push_back(i);
  }
  if (static_cast<int64_t>(nodes.size()) > most) {
    const auto first = [&](int64_t a, int64_t b) {
      const double x = weight(a), y = weight(b);
      return x != y ? x > y : a < b;
    };
    std::nth_element(nodes.begin(), nodes.begin() + most, nodes.end(), first);
    nodes.resize(static_cast<size_t>(most));
    std::sort(nodes.begin(), nodes.end());
  }
  return nodes;
}

}  // namespace

void Tree::reset(int64_t root) {
  sizes[0] = 1;
  sizes[1] = 0;
  token[0] = root;
  parent[0] = 0;
  std::fill(slot, slot + nodes, slots);
  logprob[0] = 0.0;
}

Nodes Tree::take_leaves(int64_t w) {
  constexpr double kNegInf = -std::numeric_limits<double>::infinity();
  Nodes leaves = best(count(), w, [&](int64_t i) { return slot[i] == slots ? logprob[i] : kNegInf; });
  for (const int64_t leaf : leaves) {
    const int64_t own = sizes[1]++;
    uint8_t* mine = visible + own * slots;
    std::memcpy(mine, parent_mask(leaf), static_cast<size_t>(slots));
    mine[own] = 1;
    slot[leaf] = own;
  }
  return leaves;
}

Nodes Tree::path_tokens(int64_t node) const {
  Nodes path;
  for (; node != 0; node = parent[node]) path.push_back(token[node]);
  std::reverse(path.begin(), path.end());
  return path;
}

bool Tree::is_descendant(int64_t node, int64_t root) const {
  return node == root || (slot[root] != slots && parent_mask(node)[slot[root]] != 0);
}

SubTree Tree::best_subtree(int64_t bs, int64_t root) const {
  constexpr double kNegInf = -std::numeric_limits<double>::infinity();
  SubTree found;
  const auto weight = [&](int64_t i) { return root == 0 || is_descendant(i, root) ? logprob[i] : kNegInf; };
  found.nodes = best(count(), bs, weight);
  Nodes& all = found.nodes;
  std::stable_sort(all.begin(), all.end(), [&](int64_t a, int64_t b) { return logprob[a] > logprob[b]; });
  for (const int64_t node : all) {
    found.tokens.push_back(token[node]);
    found.parents.push_back(node == root ? -1 : std::find(all.begin(), all.end(), parent[node]) - all.begin());
    found.weights.push_back(static_cast<float>(logprob[node] - logprob[root]));
  }
  return found;
}

std::pair<double, double> Tree::prospects(int64_t bs, int64_t w, int64_t root) const {
  constexpr double kNegInf = -std::numeric_limits<double>::infinity();
  const auto inside = [&](int64_t i) { return root == 0 || is_descendant(i, root) ? logprob[i] : kNegInf; };
  const auto sum = [&](const Nodes& nodes) {
    double total = 0.0;
    for (const int64_t node : nodes) total += std::exp(logprob[node] - logprob[root]);
    return total;
  };
  return {sum(best(count(), bs, inside)),
          sum(best(count(), w, [&](int64_t i) { return slot[i] == slots ? inside(i) : kNegInf; }))};
}

bool Tree::expansion_pays(int64_t bs, int64_t w, int64_t steps, int64_t root, double yield) const {
  const auto [tokens, leaves] = prospects(bs, w, root);
  return yield * leaves > tokens / static_cast<double>(steps);
}

Nodes Tree::walk(const Nodes& tokens) const {
  Nodes path;
  int64_t node = 0;
  for (const int64_t wanted : tokens) {
    int64_t child = node + 1;
    while (child < count() && (parent[child] != node || token[child] != wanted)) ++child;
    if (child == count()) break;
    path.push_back(child);
    node = child;
  }
  return path;
}

void Tree::reroot(int64_t node, Nodes& path, Nodes& surviving) {
  path.clear();
  surviving.clear();
  if (node == 0) {
    for (int64_t s = 0; s < expanded(); ++s) surviving.push_back(s);
    return;
  }
  for (int64_t s = 0; s < expanded(); ++s) {
    if (parent_mask(node)[s] != 0) path.push_back(s);
  }
  const int64_t own = slot[node];
  if (own == slots) return reset(token[node]);  // a leaf has no descendants
  for (int64_t s = 0; s < expanded(); ++s) {
    if (row(s)[own] != 0) surviving.push_back(s);
  }
  compact(node, surviving);
}

// In place: survivors move forward, so nothing is overwritten before it is read.
void Tree::compact(int64_t root, const Nodes& surviving) {
  const int64_t before = count(), used = expanded();
  const double weight = logprob[root];
  Nodes new_index(static_cast<size_t>(before)), new_slot(static_cast<size_t>(slots) + 1, slots);
  std::vector<uint8_t> stays(static_cast<size_t>(before));
  for (size_t s = 0; s < surviving.size(); ++s) new_slot[static_cast<size_t>(surviving[s])] = static_cast<int64_t>(s);
  for (int64_t i = 0; i < before; ++i) stays[static_cast<size_t>(i)] = is_descendant(i, root);
  int64_t now = 0;
  for (int64_t i = 0; i < before; ++i) {
    if (stays[static_cast<size_t>(i)] == 0) continue;
    new_index[static_cast<size_t>(i)] = now;
    token[now] = token[i];
    parent[now] = i == root ? 0 : new_index[static_cast<size_t>(parent[i])];
    slot[now] = new_slot[static_cast<size_t>(slot[i])];
    logprob[now] = logprob[i] - weight;
    ++now;
  }
  std::fill(slot + now, slot + before, slots);
  const auto rows = static_cast<int64_t>(surviving.size());
  for (int64_t a = 0; a < rows; ++a) {
    uint8_t* out = visible + a * slots;
    const uint8_t* in = row(surviving[static_cast<size_t>(a)]);
    for (int64_t b = 0; b < rows; ++b) out[b] = in[surviving[static_cast<size_t>(b)]];
    std::fill(out + rows, out + used, uint8_t{0});
  }
  sizes[0] = now;
  sizes[1] = rows;
}

}  // namespace swiftspec::host
