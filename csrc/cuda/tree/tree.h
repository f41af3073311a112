// The draft tree in device memory (swiftspec/tree/tree.py): selection of the best leaves, their mask rows, and adding
// children. For host code and device code.
//
// The rows of an expansion are ordered by descending weight, ties by node index. An expansion always has w rows and
// takes w tree slots: if there are fewer leaves, the remaining rows belong to no node, and no mask contains their
// slots.
#pragma once

#include "common/top_k.h"
#include "kernels_cuda.h"

namespace swiftspec::tree {

using cuda::Expansion;
using cuda::TreeState;

constexpr int32_t kNoSlot = -1;  // the slot of a leaf
constexpr int kUnrolled = 4;     // nodes that a lane loads before it examines any, so that their latencies overlap

// A warp selects the w leaves with the largest weights and assigns them the next slots.
SWIFTSPEC_HD void select_leaves(const TreeState& t, int w, const int64_t* prefix, const Expansion& out) {
  top_k::TopK<double> found(w);
  const int32_t nodes = t.used[0], first = t.used[1];
  for (int32_t base = 0; base < nodes; base += 32 * kUnrolled) {
    warp::PerLane<double> weight[kUnrolled];
    warp::PerLane<int32_t> node[kUnrolled];
    SWIFTSPEC_UNROLL
    for (int c = 0; c < kUnrolled; ++c) {
      SWIFTSPEC_EACH_LANE(lane) {
        const int32_t i = base + 32 * c + lane, slot = i < nodes ? t.slot[i] : 0;
        weight[c](lane) = i < nodes ? t.weight[i] : -INFINITY;
        const bool leaf = slot == kNoSlot && weight[c](lane) > -INFINITY;
        if (!leaf) weight[c](lane) = -INFINITY;
        node[c](lane) = leaf ? i : top_k::kNoIndex;
      }
    }
    SWIFTSPEC_UNROLL
    for (int c = 0; c < kUnrolled; ++c) found.offer(weight[c], node[c]);
  }
  warp::sync();
  SWIFTSPEC_EACH_LANE(lane) {
    for (int half = 0; half < 2; ++half) {
      const int row = lane + 32 * half;
      if (row >= w) continue;
      const int32_t node = found.index[half](lane) == top_k::kNoIndex ? -1 : found.index[half](lane);
      out.node[row] = node;
      out.tokens[row] = node < 0 ? 0 : t.token[node];
      out.slots[row] = *prefix + first + row;
      if (node >= 0) t.slot[node] = first + row;
    }
    if (lane == 0) t.used[1] = first + w;
  }
}

// A warp writes the mask row of a selected leaf (the row of its parent plus its own slot) and its position. Runs after
// `select_leaves`.
SWIFTSPEC_HD void write_mask_row(const TreeState& t, int row, const int64_t* prefix, const Expansion& out) {
  const int32_t node = out.node[row], mine = static_cast<int32_t>(out.slots[row] - *prefix);
  const uint8_t* above = node > 0 ? t.visible + static_cast<int64_t>(t.slot[t.parent[node]]) * t.slots : nullptr;
  int depth = 0;
  for (int32_t base = 0; base < t.slots; base += 32) {
    warp::PerLane<bool> ancestor;
    SWIFTSPEC_EACH_LANE(lane) {
      const int32_t slot = base + lane;
      ancestor(lane) = slot < t.slots && above != nullptr && above[slot] != 0;
      if (slot < t.slots) {
        const uint8_t seen = ancestor(lane) || slot == mine;
        t.visible[static_cast<int64_t>(mine) * t.slots + slot] = seen;
        out.mask[static_cast<int64_t>(row) * t.slots + slot] = seen;
      }
    }
    depth += warp::popcount(warp::ballot(ancestor));
  }
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) out.positions[row] = *prefix + depth;
  }
}

// Adds child number `child` of row `row`; each row has k children. Rows without a node come last and add nothing.
SWIFTSPEC_HD void add_child(const TreeState& t, const int32_t* node, int k, int row, int child, const int64_t* tokens,
                            const float* values) {
  if (node[row] < 0) return;
  const int32_t at = t.used[0] + row * k + child;
  t.token[at] = tokens[row * k + child];
  t.parent[at] = node[row];
  t.slot[at] = kNoSlot;
  t.weight[at] = t.weight[node[row]] + static_cast<double>(values[row * k + child]);
}

// Updates the number of nodes after all children have been added.
SWIFTSPEC_HD void count_children(const TreeState& t, const int32_t* node, int w, int k) {
  int rows = 0;
  while (rows < w && node[rows] >= 0) ++rows;
  t.used[0] += rows * k;
}

// One of `threads` threads that replace the tree by an expanded root, in slot 0, with k children.
SWIFTSPEC_HD void write_root(const TreeState& t, int64_t root, int k, const int64_t* tokens, const float* values,
                             int thread, int threads) {
  for (int i = thread; i < k; i += threads) {
    t.token[1 + i] = tokens[i];
    t.parent[1 + i] = 0;
    t.slot[1 + i] = kNoSlot;
    t.weight[1 + i] = static_cast<double>(values[i]);
  }
  for (int i = thread; i < t.slots; i += threads) t.visible[i] = i == 0;
  if (thread > 0) return;
  t.token[0] = root;
  t.parent[0] = t.slot[0] = 0;
  t.weight[0] = 0;
  t.used[0] = 1 + k;
  t.used[1] = 1;
}

}  // namespace swiftspec::tree
