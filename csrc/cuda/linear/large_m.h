// Projections with large M (more than 32 rows): partition and layouts. For host code and device code.
//
// A launch computes up to `parts` times kMaxRows rows. Each warp of a CTA computes one strip at a time, over the CTA's
// range of inputs, tile by tile: a tile of weights stays in the ring of its warp while the warp multiplies it with the
// rows of every part. The inputs come as slabs that all warps of the CTA read. pack_activations.cu writes the slabs of
// all rows in one launch before.
//
// Sums have the same order as in linear.cu, so that results are bitwise identical: for a strip, first the tiles that
// the first of the `warps_k` warps would take there (its share), then those of the second, and so on; the sum of each
// share is added to the sum of the shares before it.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "cuda/device/device.h"
#include "cuda/linear/tiling.h"

namespace swiftspec::cuda::tiles {

constexpr int kPartRows8 = kMaxRows / 8;
constexpr int kMaxParts = 4;    // 128 rows
constexpr int kMaxSlabs = 4;    // in flight per CTA
constexpr int kMinStages = 2;   // of slabs and of weights, the minimum for a pipeline
constexpr int kTargetStages = 4;  // of weights

// log2 of the warps of a CTA. In 99 KB of shared memory the sums of eight warps leave no room for a pipeline.
SWIFTSPEC_HD int large_m_warps_log(const Device& device) { return device.shared >= 128 << 10 ? 3 : 2; }

// The inputs of a tile for one part: pieces as the lanes read them, then, for int4, the group sums of every row.
SWIFTSPEC_HD int slab_sums(const Tiling& t) { return t.tile_k * kMaxRows * 2; }  // offset of the group sums
SWIFTSPEC_HD int part_bytes(const Tiling& t) {
  return slab_sums(t) + (t.group != 0 ? t.groups() * kMaxRows * static_cast<int>(sizeof(float)) : 0);
}
SWIFTSPEC_HD int slab_bytes(const Tiling& t, int parts) { return parts * part_bytes(t); }

// Iterates over the tiles of the strips of a warp, in the order of the sums. Stores only what changes, since registers
// are scarce.
struct LargeMTileIterator {
  const Tiling& t;
  int32_t cta, strip_step;
  int32_t strip, share, tile;

  SWIFTSPEC_HD bool done() const { return strip >= t.strips || t.range(cta) == 0; }
  SWIFTSPEC_HD void next() {
    tile += t.warps_k();
    if (tile < t.first_tile(cta + 1)) return;
    tile = t.first_tile(cta) + ++share;
    if (share < t.warps_k() && tile < t.first_tile(cta + 1)) return;
    share = 0, tile = t.first_tile(cta), strip += strip_step;
  }
};

// The tiles of strip `warp` in each iteration of a cluster over 1 << log strips.
SWIFTSPEC_HD LargeMTileIterator large_m_tiles(const Tiling& t, int log, int cluster, int clusters, int cta, int warp) {
  return {t, cta, clusters << log, (cluster << log) + warp, 0, t.first_tile(cta)};
}

// Shared-memory layout of a CTA, offsets in bytes. Offset 0 holds the sums of an iteration, in the order of partial_at.
struct LargeMSmemLayout {
  int32_t slabs, slab_count, ring, stages, barriers, slab_barriers, total;
};

SWIFTSPEC_HD LargeMSmemLayout large_m_smem_layout(const Tiling& t, int parts, const Device& device) {
  LargeMSmemLayout c{};
  const int warps = 1 << large_m_warps_log(device), slab = slab_bytes(t, parts), tiles_bytes = warps * t.tile_bytes;
  c.slab_barriers = warps * parts * kPartRows8 * 1024;
  c.barriers = c.slab_barriers + 128;
  c.slabs = c.barriers + warps * kMaxStages * 8;
  const int left = device.shared - c.slabs;
  c.slab_count = kMinStages;  // more only if that leaves kTargetStages for the weights
  while (c.slab_count < kMaxSlabs && left - (c.slab_count + 1) * slab >= kTargetStages * tiles_bytes) ++c.slab_count;
  const int stages = (left - c.slab_count * slab) / tiles_bytes;
  c.stages = stages < kMaxStages ? stages : kMaxStages;
  c.ring = c.slabs + c.slab_count * slab;
  c.total = c.ring + c.stages * tiles_bytes;
  return c;
}

// Number of parts of a launch for `rows` rows; 0 if the rows are few or the layout does not fit. int4 products are
// compute-bound from 64 rows on, bf16 products, whose weights have four times the bytes, from 128 on, and int4 products
// with four warps per CTA from 32 on.
SWIFTSPEC_HD int large_m_parts(const Tiling& t, int64_t rows, const Device& device) {
  if (rows <= kMaxRows || (t.group != 0 && 1 << large_m_warps_log(device) < kWarps)) return 0;
  int parts = t.group == 0 && rows > kMaxParts / 2 * kMaxRows ? kMaxParts : kMaxParts / 2;
  for (; parts > 1; parts /= 2) {
    if (large_m_smem_layout(t, parts, device).stages >= kMinStages) return parts;
  }
  return 0;
}

// Number of parts of all launches for `rows` rows. Each launch has as many as the first; the last one may have fewer.
SWIFTSPEC_HD int total_parts(const Tiling& t, int64_t rows, const Device& device) {
  int all = 0;
  for (int parts = 1; parts > 0; all += parts) parts = large_m_parts(t, rows - all * kMaxRows, device);
  return all;
}

// Offset in bytes of a tile's inputs for `part`: ordered by launch, then by slab. `parts` is that of the first launch.
SWIFTSPEC_HD int64_t part_offset(const Tiling& t, int parts, int all, int part, int tile) {
  const int before = part / parts * parts, here = all - before < parts ? all - before : parts;
  return (static_cast<int64_t>(before) * t.tiles + static_cast<int64_t>(tile) * here + part - before) * part_bytes(t);
}

}  // namespace swiftspec::cuda::tiles
