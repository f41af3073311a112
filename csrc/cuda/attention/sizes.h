// Partitioning of attention: keys into units, tiles and parts, rows into groups.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/host_device.h"
#include "cuda/arch.h"
#include "kernels_cuda.h"

namespace swiftspec::attention {

using cuda::AttentionShape;

constexpr int kUnit = 16;     // keys per MMA fragment
constexpr int kColumns = 64;  // rows x heads per group
constexpr int kPad = 8;            // padding elements per line, so that eight lines use 32 different banks
constexpr int kMaxParts = 64;      // per sequence

SWIFTSPEC_HD constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
SWIFTSPEC_HD constexpr int64_t max64(int64_t a, int64_t b) { return a < b ? b : a; }
SWIFTSPEC_HD constexpr int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }
// Device code indexes rows, keys and parts with 32 bits (the bindings check the sizes): GPUs have no 64-bit division.
SWIFTSPEC_HD constexpr int min32(int a, int b) { return a < b ? a : b; }
SWIFTSPEC_HD constexpr int max32(int a, int b) { return a < b ? b : a; }
SWIFTSPEC_HD constexpr int ceil_div32(int count, int size) { return (count + size - 1) / size; }

// Shape of the kernel for heads of kDim_ elements: kCluster_ blocks combine their results through distributed shared
// memory; a block holds kStage_ units of keys or values in shared memory, and kBlocksPerSm_ of them share a
// multiprocessor. `Stored_` is the element type of the cache: uint16_t for bfloat16, uint8_t for float8.
template <AttentionShape kName_, int kDim_, int kCluster_, int kTile_, int kStage_, class Stored_,
          int kBlocksPerSm_ = 1>
struct KernelShape {
  using Stored = Stored_;
  static constexpr AttentionShape kName = kName_;
  static constexpr int kDim = kDim_, kCluster = kCluster_, kTile = kTile_, kStage = kStage_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  // Four warps per scheduler, since every phase of a tile waits for latencies.
  static constexpr int kWarps = kCluster > 1 ? 16 / kBlocksPerSm : 8, kThreads = 32 * kWarps;
  // Unrolled steps of the loops over a key's dimensions and over units of values. With two blocks per multiprocessor a
  // thread has 128 registers, of which the output of heads of 128 takes 32.
  static constexpr bool kFewRegisters = kBlocksPerSm == 2 && kDim == 128;
  static constexpr int kScoreSteps = kFewRegisters ? 1 : kDim / 16, kValueUnits = kFewRegisters ? 1 : 4;
  static constexpr int kVectorElements = 16 / sizeof(Stored);            // numbers of the cache per 16-byte load
  static constexpr int kUnits = kTile / kUnit;                           // of a tile
  static constexpr int kOwnUnits = kColumns * kUnits;                    // units for single rows, at most
  static constexpr int kStageBuffers =
      kStage / (2 * kUnits) < 2 ? 1 : 2;  // tiles whose keys and values find room together
  static constexpr int kScoreStride =
      (kTile < kDim ? kDim : kTile) + 4;  // floats from one column's scores to the next's
  // Turns of part 0 before other parts have any, see `first_turn`: 1,024 keys.
  static constexpr int kFirstTurns = kCluster > 1 ? 1024 / (kTile * kCluster) : 1;
};
template <int kDim, class Stored = uint16_t>
using ClusterShape = KernelShape<AttentionShape::kShort, kDim, 8, 128, 40, Stored>;  // up to 222 KB of shared memory
// For a cache of more than kShortCapacity slots per sequence. More of its clusters run concurrently, so long contexts
// keep more multiprocessors busy: 32,000 tokens of 8 KV heads take 127 instead of 225 us on an H100, but 1,000 tokens,
// two turns, 19 instead of 14 us.
template <int kDim, class Stored = uint16_t>
using LongShape = KernelShape<AttentionShape::kLong, kDim, 4, 128, 40, Stored>;
constexpr int kShortCapacity = 8192;
// A variant: two blocks per multiprocessor, so that one computes while the other waits for keys or at a barrier. Up to
// 113 KB of shared memory.
template <int kDim, class Stored = uint16_t>
using PairedShape = KernelShape<AttentionShape::kPaired, kDim, 4, 64, kDim == 64 ? 32 : 14, Stored, 2>;
template <int kDim, class Stored = uint16_t>  // for GPUs without clusters: up to 96 KB
using BlockShape = KernelShape<AttentionShape::kShort, kDim, 1, 64, 10, Stored>;
// The shape of this name on the architecture that is compiled.
template <AttentionShape kName, int kDim, class Stored = uint16_t>
using DeviceShape = std::conditional_t<
    !ptx::kClusters, BlockShape<kDim, Stored>,
    std::conditional_t<kName == AttentionShape::kShort, ClusterShape<kDim, Stored>,
                       std::conditional_t<kName == AttentionShape::kLong, LongShape<kDim, Stored>,
                                          PairedShape<kDim, Stored>>>>;

// A turn is one tile per block of a cluster. The turns of a sequence are dealt to its parts: the first kFirstTurns to part
// 0, then one to each of the parts, from part 1 on, again and again. So the part of a key, and the order of the sums, follow from
// its number; short contexts have one part, and in long ones the parts have equal lengths. Each cluster computes a part.
// Another turn of part 0 takes less time than combining two parts.

// Largest number of parts of a sequence: as many as run concurrently.
SWIFTSPEC_HD constexpr int most_parts(int64_t clusters, int64_t kv_heads) {
  return static_cast<int>(min64(max64(clusters / kv_heads, 1), kMaxParts));
}

// Number of parts of `keys` keys.
template <class F>
SWIFTSPEC_HD constexpr int part_count(int keys, int most) {
  const int turns = ceil_div32(keys, F::kTile * F::kCluster);
  return turns <= F::kFirstTurns ? 1 : min32(turns - F::kFirstTurns + 1, most);
}

// The first turn of a part, and the one after `turn` of the same part.
template <class F>
SWIFTSPEC_HD constexpr int first_turn(int part) {
  return part == 0 ? 0 : F::kFirstTurns - 1 + part;
}
template <class F>
SWIFTSPEC_HD constexpr int next_turn(int turn, int most) {
  return turn < F::kFirstTurns - 1 ? turn + 1 : turn + most;
}

}  // namespace swiftspec::attention
