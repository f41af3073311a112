// The draft tree of swiftspec/tree/tree.py, which owns and documents the arrays.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace swiftspec::host {

using Nodes = std::vector<int64_t>;

// Nodes of a tree, their tokens, the index of each parent among them (-1 for the first one), and their
// log-probabilities relative to the first one.
struct SubTree {
  Nodes nodes, tokens, parents;
  std::vector<float> weights;
};

struct Tree {
  int64_t *token, *parent, *slot;  // [nodes]
  double* logprob;                 // [nodes]
  uint8_t* visible;                // [slots + 1, slots], the last row all zero
  int64_t* sizes;                  // nodes in use, tree slots in use
  int64_t nodes, slots;

  int64_t count() const { return sizes[0]; }
  int64_t expanded() const { return sizes[1]; }
  const uint8_t* row(int64_t of_slot) const { return visible + of_slot * slots; }
  const uint8_t* parent_mask(int64_t node) const { return row(slot[parent[node]]); }  // visible slots of the parent

  void reset(int64_t root);

  // Selects up to w of the likeliest leaves in node order and assigns the next tree slot and mask row to each. Here and
  // below the earlier node wins a tie.
  Nodes take_leaves(int64_t w);

  // Appends k children to each node of `under`, with their log-probabilities.
  template <class T>
  void add_children(const Nodes& under, int64_t k, const int64_t* tokens, const T* logprobs) {
    int64_t at = count();
    for (const int64_t node : under) {
      for (int64_t i = 0; i < k; ++i, ++at) {
        token[at] = *tokens++;
        parent[at] = node;
        logprob[at] = logprob[node] + static_cast<double>(*logprobs++);
      }
    }
    sizes[0] = at;
  }

  // The tokens from the root's child down to `node`; empty for the root.
  Nodes path_tokens(int64_t node) const;

  // The likeliest `bs` nodes of the sub-tree of `root`, likeliest first; of equal ones the earlier, so parents come
  // first.
  SubTree best_subtree(int64_t bs, int64_t root) const;

  // Probability mass, relative to `root`, of the bs likeliest nodes and of the w likeliest leaves of its sub-tree.
  std::pair<double, double> prospects(int64_t bs, int64_t w, int64_t root) const;

  // Whether one more expansion after a result pays; see `expansion_pays` in swiftspec/tree/tree.py. `yield`: tokens per
  // round that it adds, per probability of its leaves. `steps`: expansions per round.
  bool expansion_pays(int64_t bs, int64_t w, int64_t steps, int64_t root, double yield) const;

  // The path below the root that matches the longest prefix of `tokens`.
  Nodes walk(const Nodes& tokens) const;

  // Makes `node` the root and drops nodes outside its sub-tree. `path`: the tree slots from the old root to the parent
  // of `node`; `surviving`: the slots that are kept and become 0, 1, ...
  void reroot(int64_t node, Nodes& path, Nodes& surviving);

 private:
  bool is_descendant(int64_t node, int64_t root) const;
  void compact(int64_t root, const Nodes& surviving);
};

}  // namespace swiftspec::host
