// The tile of a block: its task, its shared memory, and the units of 16 keys that it loads.
#pragma once

#include <cstdint>

#include "cuda/attention/sizes.h"
#include "cuda/attention/key_lists.h"
#include "kernels_cuda.h"

namespace swiftspec::attention {

template <class F>
struct SharedMemory {
  alignas(16) uint16_t stage[F::kStage][kUnit][F::kDim + kPad];
  alignas(16) uint16_t queries[kColumns][F::kDim + kPad];
  alignas(16) float scores[kColumns][F::kScoreStride];  // then, where they were, shares in bfloat16; then output [kDim]
  float top[kColumns];      // maximum of a column's scores in the tiles so far, base 2; -inf without keys
  float total[kColumns];    // sum of its shares
  float rescale[kColumns];  // factor of the sums of the tiles before this one
  int32_t key_counts[kColumns];                        // keys of each column's row
  uint16_t own[F::kOwnUnits];                    // the units for single rows: row * kUnits + index in the tile
  int32_t slots[F::kStage][kUnit];               // of the keys of such units, for the next load; -1: no key
  int32_t shared_units, units;
  int32_t last;  // this cluster was the last of its group
};

static_assert(sizeof(SharedMemory<PairedShape<128>>) <= 113 << 10 && sizeof(SharedMemory<PairedShape<64>>) <= 113 << 10,
              "two blocks find no room on a multiprocessor with 228 KB");

// The work of a block: the keys and values of one KV head, a group of rows, a tile.
template <class F>
struct TileTask {
  const AttentionSetup& setup;
  const typename F::Stored *keys, *values;  // of the layer
  uint16_t* out;
  int head;  // KV head
  RowGroup group;
  int entry;  // index of the group in setup.groups
  int part;   // that the cluster computes
  int tile;

  SWIFTSPEC_HD int sequence() const { return static_cast<int>(sequence_of(setup, group.first)); }
  SWIFTSPEC_HD int heads() const { return setup.heads_per_kv_head; }
  SWIFTSPEC_HD int capacity() const { return static_cast<int>(setup.capacity); }
  SWIFTSPEC_HD int columns() const { return group.count * heads(); }
  SWIFTSPEC_HD int column_blocks() const { return (columns() + 7) / 8; }
  // Number of the first key of unit i of a tile. The units of a turn are dealt to the blocks one by one.
  SWIFTSPEC_HD static int unit_key(int tile, int i) {
    return (tile / F::kCluster * F::kUnits * F::kCluster + i * F::kCluster + tile % F::kCluster) * kUnit;
  }
  // Number of units of a tile that begin before key `end`.
  SWIFTSPEC_HD static int units_before(int tile, int end) {
    return min32(ceil_div32(max32(end - unit_key(tile, 0), 0), F::kCluster * kUnit), F::kUnits);
  }
  // Number of units of a tile whose keys lie in the first `slots` slots, which all rows see.
  SWIFTSPEC_HD static int units_within(int tile, int slots) { return units_before(tile, slots / kUnit * kUnit); }
  SWIFTSPEC_HD int tile_id(int which) const {
    return sequence() * ceil_div32(capacity(), F::kTile * F::kCluster) * F::kCluster + which;
  }
  SWIFTSPEC_HD int64_t region() const { return (sequence() * setup.kv_heads + head) * setup.capacity * F::kDim; }
  SWIFTSPEC_HD int parts() const { return part_count<F>(group.keys, setup.most_parts); }
  SWIFTSPEC_HD int max_parts() const { return part_count<F>(capacity(), setup.most_parts); }  // that a sequence may have
  SWIFTSPEC_HD int scratch(int which, int column) const {
    return ((head * max_parts() + which) * static_cast<int>(setup.rows) + group.first) * heads() + column;
  }
  // The query of a column after RoPE.
  SWIFTSPEC_HD const uint16_t* query(int column) const {
    const int row = group.first + column / heads(), which = head * heads() + column % heads();
    return setup.queries + (static_cast<int64_t>(row) * static_cast<int>(setup.heads) + which) * F::kDim;
  }
};

// Plans the units of the tile: first those that all rows share, then the separate units of each row. Reads
// `key_counts`.
template <class F>
SWIFTSPEC_HD void plan_units(const TileTask<F>& j, SharedMemory<F>& s, int thread) {
  const int shared = j.units_within(j.tile, j.group.base);
  const auto own = [&](int row) { return max32(j.units_before(j.tile, s.key_counts[row * j.heads()]) - shared, 0); };
  if (thread >= j.group.count) return;
  int at = 0;
  for (int row = 0; row < thread; ++row) at += own(row);
  const int mine = own(thread);
  for (int i = 0; i < mine; ++i) s.own[at + i] = static_cast<uint16_t>(thread * F::kUnits + shared + i);
  if (thread == j.group.count - 1) {
    s.shared_units = shared;
    s.units = shared + at + mine;
  }
}

struct Unit {
  int row;         // of the group; its key list names the slots
  int index;       // in the tile
  int first, end;  // columns
};

// The i-th unit that the tile loads.
template <class F>
SWIFTSPEC_HD Unit unit_at(const TileTask<F>& j, const SharedMemory<F>& s, int i) {
  if (i < s.shared_units) return {0, i, 0, j.columns()};
  const int code = s.own[i - s.shared_units], row = code / F::kUnits;
  return {row, code % F::kUnits, row * j.heads(), (row + 1) * j.heads()};
}

}  // namespace swiftspec::attention
