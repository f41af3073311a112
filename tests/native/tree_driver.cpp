// Expands a draft tree with the CUDA code on a CPU (test_cuda_code.py builds this with sanitizers). Arguments:
// expansions, w, k, slots, prefix, spread, and whether the root is expanded before, alone. A child's token is a hash of its parent's and its number, its
// log-probability a hash of that, one of `spread` values. Prints for each row of each expansion "row", node, token,
// position, slot and the slots it sees; then for each node "node", token, parent, weight.
#include "cuda/tree/tree.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/noise.h"

using namespace swiftspec;

namespace {

int64_t child_token(int64_t parent, int child) {
  return noise::mix(static_cast<uint32_t>(parent) * 31u + static_cast<uint32_t>(child));
}

float child_value(int64_t token, uint32_t spread) {
  const uint32_t hash = noise::mix(static_cast<uint32_t>(token) + 1) % spread;
  return hash % 7 == 6 ? -INFINITY : -static_cast<float>(hash) / (1 << 18);
}

}  // namespace

int main(int, char** arguments) {
  const int expansions = std::atoi(arguments[1]), w = std::atoi(arguments[2]), k = std::atoi(arguments[3]);
  const int slots = std::atoi(arguments[4]);
  const int64_t prefix = std::atoi(arguments[5]);
  const auto spread = static_cast<uint32_t>(std::atoi(arguments[6]));
  const auto nodes = static_cast<size_t>(1 + slots * k), rows = static_cast<size_t>(w);
  std::vector<int64_t> token(nodes), tokens(rows), positions(rows), row_slots(rows);
  std::vector<int32_t> parent(nodes), slot(nodes, tree::kNoSlot), used = {1, 0}, node(rows);
  std::vector<double> weight(nodes);
  std::vector<uint8_t> visible(static_cast<size_t>(slots * slots), 7), mask(rows * static_cast<size_t>(slots));
  token[0] = std::atoi(arguments[7]) != 0 ? 9 : 5;  // 9: `write_root` replaces it
  const cuda::TreeState t{token.data(), parent.data(), slot.data(), weight.data(), visible.data(), used.data(),
                          static_cast<int32_t>(nodes), slots};
  const cuda::Expansion out{node.data(), tokens.data(), positions.data(), row_slots.data(), mask.data()};
  if (std::atoi(arguments[7]) != 0) {
    std::vector<int64_t> children;
    std::vector<float> values;
    for (int child = 0; child < k; ++child) {
      children.push_back(child_token(5, child));
      values.push_back(child_value(children.back(), spread));
    }
    for (int thread = 0; thread < 3; ++thread) tree::write_root(t, 5, k, children.data(), values.data(), thread, 3);
    std::printf("row 0 5 %lld %lld", static_cast<long long>(prefix), static_cast<long long>(prefix));
    for (int s = 0; s < slots; ++s) {
      if (visible[static_cast<size_t>(s)] != 0) std::printf(" %d", s);
    }
    std::printf("\n");
  }
  for (int i = 0; i < expansions; ++i) {
    tree::select_leaves(t, w, &prefix, out);
    for (int row = 0; row < w; ++row) tree::write_mask_row(t, row, &prefix, out);
    std::vector<int64_t> children;
    std::vector<float> values;
    for (size_t row = 0; row < rows; ++row) {
      std::printf("row %d %lld %lld %lld", node[row], static_cast<long long>(tokens[row]),
                  static_cast<long long>(positions[row]), static_cast<long long>(row_slots[row]));
      for (int s = 0; s < slots; ++s) {
        if (mask[row * static_cast<size_t>(slots) + static_cast<size_t>(s)] != 0) std::printf(" %d", s);
      }
      std::printf("\n");
      for (int child = 0; child < k; ++child) {
        children.push_back(child_token(tokens[row], child));
        values.push_back(child_value(children.back(), spread));
      }
    }
    for (int child = 0; child < w * k; ++child) {
      tree::add_child(t, node.data(), k, child / k, child % k, children.data(), values.data());
    }
    tree::count_children(t, node.data(), w, k);
  }
  for (size_t i = 0; i < static_cast<size_t>(used[0]); ++i) {
    std::printf("node %lld %d %.17g\n", static_cast<long long>(token[i]), parent[i], weight[i]);
  }
  return 0;
}
