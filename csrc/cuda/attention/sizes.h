// Partitioning of attention: keys into units, tiles and parts, rows into groups.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/host_device.h"
#include "cuda/arch.h"

namespace swiftspec::attention {

constexpr int kUnit = 16;     // keys per MMA fragment
constexpr int kColumns = 64;  // rows x heads per group
constexpr int kPad = 8;            // padding elements per line, so that eight lines use 32 different banks
constexpr int kMaxParts = 64;      // per sequence, if a block processes the tiles of a part sequentially

SWIFTSPEC_HD constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
SWIFTSPEC_HD constexpr int64_t max64(int64_t a, int64_t b) { return a < b ? b : a; }
SWIFTSPEC_HD constexpr int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }
// Device code indexes rows, keys and parts with 32 bits (the bindings check the sizes): GPUs have no 64-bit division.
SWIFTSPEC_HD constexpr int min32(int a, int b) { return a < b ? a : b; }
SWIFTSPEC_HD constexpr int max32(int a, int b) { return a < b ? b : a; }
SWIFTSPEC_HD constexpr int ceil_div32(int count, int size) { return (count + size - 1) / size; }

// Shape of the kernel for heads of kDim_ elements: kCluster_ blocks combine their results through distributed shared
// memory, each of them with one tile of kTile_ keys; a block holds kStage_ units of keys or values in shared memory.
// `Stored_` is the element type of the cache: uint16_t for bfloat16, uint8_t for float8.
template <int kDim_, int kCluster_, int kTile_, int kStage_, class Stored_>
struct KernelShape {
  using Stored = Stored_;
  static constexpr int kDim = kDim_, kCluster = kCluster_, kTile = kTile_, kStage = kStage_;
  // Four warps per scheduler, since every phase of a tile waits for latencies; without clusters the sequence of tiles
  // takes more registers.
  static constexpr int kWarps = kCluster > 1 ? 16 : 8, kThreads = 32 * kWarps;
  static constexpr int kVectorElements = 16 / sizeof(Stored);            // numbers of the cache per 16-byte load
  static constexpr int kUnits = kTile / kUnit;                           // of a tile
  static constexpr int kOwnUnits = kColumns * kUnits;                    // units for single rows, at most
  static constexpr int kStageBuffers =
      kStage / (2 * kUnits) < 2 ? 1 : 2;  // tiles whose keys and values find room together
  static constexpr int kScoreStride =
      (kTile < kDim ? kDim : kTile) + 4;  // floats from one column's scores to the next's
  static constexpr bool kSequential = kCluster == 1;                         // one block computes all tiles of a part
};
template <int kDim, class Stored = uint16_t>
using ClusterShape = KernelShape<kDim, 8, 128, 40, Stored>;  // up to 222 KB of shared memory
template <int kDim, class Stored = uint16_t>
using BlockShape = KernelShape<kDim, 1, 64, 10, Stored>;  // for GPUs without clusters: up to 96 KB
template <int kDim, class Stored = uint16_t>  // for the architecture that is compiled
using DeviceShape = std::conditional_t<ptx::kClusters, ClusterShape<kDim, Stored>, BlockShape<kDim, Stored>>;

// Keys in a part, the share of a sequence that one cluster reads: one tile per block. Without clusters a block takes
// several tiles if there would be more than kMaxParts parts to combine.
template <class F>
SWIFTSPEC_HD constexpr int part_keys(int64_t capacity) {
  constexpr int once = F::kTile * F::kCluster;
  const int tiles = ceil_div32(static_cast<int>(capacity), once);
  return F::kSequential ? once * max32(ceil_div32(tiles, kMaxParts), 1) : once;
}

// Number of clusters that share the `count` parts of each of `rows` rows, if `clusters` clusters run concurrently: the
// smallest number that minimises the parts on the critical path. More clusters than run concurrently can help, since
// the parts of a row are processed sequentially: for 8 rows of 32 parts, 15 clusters process 22 parts one after the
// other with 3 clusters per row, and 32 with 1 or 2. The limit is twice the concurrent number, because clusters without
// a part exit immediately but still have to be scheduled.
SWIFTSPEC_HD constexpr int64_t clusters_per_row(int64_t clusters, int64_t rows, int64_t count) {
  int64_t best = 1, least_parts = INT64_MAX;
  for (int64_t each = 1; each <= min64(count, max64(2 * clusters / rows, 1)); ++each) {
    const int64_t longest = ceil_div(rows * each, clusters) * ceil_div(count, each);
    if (longest < least_parts) best = each, least_parts = longest;
  }
  return best;
}

}  // namespace swiftspec::attention
