// Projections of more rows than one part has: what they bring and keep, in numbers. For host code and device code.
//
// A launch takes up to `parts` times kMaxRows rows. A CTA takes a strip for each of its warps at a time, and its range
// of inputs tile by tile: a tile of weights lies in its warp's ring while the warp multiplies it with every part's
// rows, and the inputs come as slabs, which all warps of the CTA read. One launch in front arranges those of all rows.
//
// Sums keep the order that `cut` gives them, in which other warps compute: for a strip, first the tiles that its first
// warp would take, then those of the second, and so on; each share's sum is added to that of those before it.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "cuda/device/device.h"
#include "cuda/linear/tiling.h"

namespace swiftspec::cuda::tiles {

constexpr int kPartRows8 = kMaxRows / 8;
constexpr int kMaxParts = 4;    // 128 rows
constexpr int kMaxSlabs = 4;    // under way for each CTA
constexpr int kMinStages = 2, kTargetStages = 4;  // of slabs and of weights, or it is no stream; of weights

// Warps of a CTA, a strip for each at a time: 1 << large_m_warps_log. In 99 KB the sums of eight leave no room for a
// stream.
SWIFTSPEC_HD int large_m_warps_log(const Device& device) { return device.shared >= 128 << 10 ? 3 : 2; }

// A tile's inputs of one part: pieces as lanes read them, then, of int4, sums of the groups of every row.
SWIFTSPEC_HD int slab_sums(const Tiling& t) { return t.tile_k * kMaxRows * 2; }  // where they begin
SWIFTSPEC_HD int part_bytes(const Tiling& t) {
  return slab_sums(t) + (t.group != 0 ? t.groups() * kMaxRows * static_cast<int>(sizeof(float)) : 0);
}
SWIFTSPEC_HD int slab_bytes(const Tiling& t, int parts) { return parts * part_bytes(t); }

// The tiles of a CTA's strip after strip, in the order of the sums. It keeps what changes alone: registers are scarce.
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

// Of the strip `warp` of each turn of a cluster, of 1 << log strips.
SWIFTSPEC_HD LargeMTileIterator large_m_tiles(const Tiling& t, int log, int cluster, int clusters, int cta, int warp) {
  return {t, cta, clusters << log, (cluster << log) + warp, 0, t.first_tile(cta)};
}

// The shared memory of a CTA, in bytes: `joined` holds a turn's sums, in the order of partial_at.
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
  c.slab_count = kMinStages;  // more only where the weights have enough
  while (c.slab_count < kMaxSlabs && left - (c.slab_count + 1) * slab >= kTargetStages * tiles_bytes) ++c.slab_count;
  const int stages = (left - c.slab_count * slab) / tiles_bytes;
  c.stages = stages < kMaxStages ? stages : kMaxStages;
  c.ring = c.slabs + c.slab_count * slab;
  c.total = c.ring + c.stages * tiles_bytes;
  return c;
}

// How many parts a launch for so many rows has; 0 where it has few or finds no room. Products of int4 are bound by
// arithmetic from 64 rows on, those of bf16, whose weights have four times the bytes, from 128 on; where a CTA has four
// warps, those of int4 from 32 on.
SWIFTSPEC_HD int large_m_parts(const Tiling& t, int64_t rows, const Device& device) {
  if (rows <= kMaxRows || (t.group != 0 && 1 << large_m_warps_log(device) < kWarps)) return 0;
  int parts = t.group == 0 && rows > kMaxParts / 2 * kMaxRows ? kMaxParts : kMaxParts / 2;
  for (; parts > 1; parts /= 2) {
    if (large_m_smem_layout(t, parts, device).stages >= kMinStages) return parts;
  }
  return 0;
}

// Of all launches for so many rows. Each has as many as the first, the last one perhaps fewer.
SWIFTSPEC_HD int total_parts(const Tiling& t, int64_t rows, const Device& device) {
  int all = 0;
  for (int parts = 1; parts > 0; all += parts) parts = large_m_parts(t, rows - all * kMaxRows, device);
  return all;
}

// Where a tile's inputs of `part` lie, in bytes: launch by launch, slab by slab. `parts` are the first launch's.
SWIFTSPEC_HD int64_t part_offset(const Tiling& t, int parts, int all, int part, int tile) {
  const int before = part / parts * parts, here = all - before < parts ? all - before : parts;
  return (static_cast<int64_t>(before) * t.tiles + static_cast<int64_t>(tile) * here + part - before) * part_bytes(t);
}

}  // namespace swiftspec::cuda::tiles
