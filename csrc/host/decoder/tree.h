// The draft tree of swiftspec/tree/tree.py, on the arrays that it keeps. See there for what they hold.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace swiftspec::host {

using Nodes = std::vector<int64_t>;

// Some nodes of a tree, their tokens, and their parents by index among them; the first one's is -1.
struct SubTree {
  Nodes nodes, tokens, parents;
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
  const uint8_t* above(int64_t node) const { return row(slot[parent[node]]); }  // what the node's parent sees

  void reset(int64_t root);

  // The w likeliest leaves, fewer where there are fewer, in the order of the nodes; each gets the next tree slot
  // and its mask row. Of equal weights the earlier node comes first, here and below.
  Nodes take_leaves(int64_t w);

  // Hangs k tokens under each of `under`, with their log-probabilities.
  void add_children(const Nodes& under, int64_t k, const int64_t* tokens, const float* logprobs);

  // The likeliest `bs` nodes from `root` down, the likeliest first; of equal ones the earlier, so parents come first.
  SubTree best_subtree(int64_t bs, int64_t root) const;

  // The summed probabilities, from `root` down and relative to it, of the bs likeliest nodes and of the w likeliest
  // leaves.
  std::pair<double, double> prospects(int64_t bs, int64_t w, int64_t root) const;

  // The nodes that spell as many leading tokens as the tree holds, from below the root down.
  Nodes walk(const Nodes& tokens) const;

  // Makes `node` the root and drops what is not below it. `path`: the tree slots from the old root to the node's
  // parent; `kept`: those that stay, which become 0, 1, ...
  void reroot(int64_t node, Nodes& path, Nodes& kept);

 private:
  bool below(int64_t node, int64_t root) const;
  void keep(int64_t root, const Nodes& kept);
};

}  // namespace swiftspec::host
