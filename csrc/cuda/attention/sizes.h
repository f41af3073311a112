// How attention is cut: keys into units, tiles and parts, rows into groups.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/host_device.h"
#include "cuda/arch.h"

namespace swiftspec::attention {

constexpr int kUnit = 16;     // keys of a fragment
constexpr int kColumns = 64;  // rows x heads of a group
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kPad = 8;           // elements after a line, so that eight lines meet 32 different banks
constexpr int64_t kMaxParts = 64;  // of a sequence, where a block takes several tiles of a part in turn

SWIFTSPEC_HD constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
SWIFTSPEC_HD constexpr int64_t max64(int64_t a, int64_t b) { return a < b ? b : a; }
SWIFTSPEC_HD constexpr int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The kernel for heads of kDim_: how many blocks join their results through each other's shared memory, each with one
// tile of kTile_ keys, and how many units of keys or values a block has in shared memory. `Stored_` is what the cache
// holds: bfloat16 as uint16_t, or float8 as uint8_t.
template <int kDim_, int kCluster_, int kTile_, int kStage_, class Stored_>
struct KernelShape {
  using Stored = Stored_;
  static constexpr int kDim = kDim_, kCluster = kCluster_, kTile = kTile_, kStage = kStage_;
  static constexpr int kVectorElements = 16 / sizeof(Stored);                      // numbers of the cache that are loaded at once
  static constexpr int kUnits = kTile / kUnit;                           // of a tile
  static constexpr int kOwnUnits = kColumns * kUnits;                    // units for single rows, at most
  static constexpr int kStageBuffers = kStage / (2 * kUnits) < 2 ? 1 : 2;       // tiles whose keys and values find room together
  static constexpr int kScoreStride = (kTile < kDim ? kDim : kTile) + 4;  // floats from one column's scores to the next's
  static constexpr bool kSequential = kCluster == 1;                         // a part's tiles are one block's, in turn
};
template <int kDim, class Stored = uint16_t>
using ClusterShape = KernelShape<kDim, 8, 128, 40, Stored>;  // up to 222 KB of shared memory
template <int kDim, class Stored = uint16_t>
using BlockShape = KernelShape<kDim, 1, 64, 10, Stored>;  // for GPUs without clusters: up to 96 KB
template <int kDim, class Stored = uint16_t>  // of the GPU that is compiled for
using DeviceShape = std::conditional_t<ptx::kClusters, ClusterShape<kDim, Stored>, BlockShape<kDim, Stored>>;

// Keys of a part of a sequence, which a cluster reads: a tile for each of its blocks. A lone block takes several where
// that leaves too many parts to be joined.
template <class F>
SWIFTSPEC_HD constexpr int64_t part_keys(int64_t capacity) {
  constexpr int64_t once = F::kTile * F::kCluster;
  return F::kSequential ? once * max64(ceil_div(ceil_div(capacity, once), kMaxParts), 1) : once;
}

// How many clusters share the `count` parts of a row, where each of `rows` rows gets so many and `clusters` run at a
// time: the fewest with which the longest way is shortest. More than run at a time may be worth it, since a row's parts
// are taken in turn: of 8 rows with 32 parts each, 15 clusters do 22 parts in a row if there are 3 for each row, and 32
// if there are 1 or 2. At most twice as many as run: where a row is short, those without a part only come and go.
SWIFTSPEC_HD constexpr int64_t clusters_per_row(int64_t clusters, int64_t rows, int64_t count) {
  int64_t best = 1, least_parts = INT64_MAX;
  for (int64_t each = 1; each <= min64(count, max64(2 * clusters / rows, 1)); ++each) {
    const int64_t longest = ceil_div(rows * each, clusters) * ceil_div(count, each);
    if (longest < least_parts) best = each, least_parts = longest;
  }
  return best;
}

}  // namespace swiftspec::attention
