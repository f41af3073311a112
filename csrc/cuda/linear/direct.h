// Projections whose blocks end early (Variant kDirect): partition, layout and estimated time. For host code and device
// code.
//
// A block computes block_strips strips, over the inputs of its CTA in the cluster. The warps_k() warps of a strip are all
// warps of the block: each requests its tiles of all strips before it waits for the previous kernel, keeps its inputs in
// registers, and its partial sums meet those of the other warps once. So the fixed time of a block is short, several
// blocks share a multiprocessor, and those of the next kernel take the place of those that have ended.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "cuda/device/device.h"
#include "cuda/linear/tiling.h"

namespace swiftspec::cuda::tiles {

constexpr int kDirectTiles = 4;  // of a strip and warp, whose inputs the registers hold
constexpr int kShares = 8;       // sums of squares per row and CTA, see squares_of

// Warps of a strip and strips of a block, for each kernel.
struct DirectShape {
  int32_t warps, strips;
};
constexpr DirectShape kDirectShapes[] = {{8, 1}, {4, 1}, {4, 2}};

// Shared-memory layout of a block, offsets in bytes. Offset 0 holds the tiles: [warp][tile][strip].
struct DirectSmemLayout {
  int32_t warp_tiles;  // tiles of a strip and warp, at most
  int32_t barriers, norm_barrier, norm, squares, totals, partial, joined, total;
};

SWIFTSPEC_HD int direct_warp_tiles(const Tiling& t) {
  return static_cast<int>(ceil_div(ceil_div(t.tiles, t.cluster()), t.warps_k()));
}

SWIFTSPEC_HD DirectSmemLayout direct_smem_layout(const Tiling& t) {
  DirectSmemLayout c{};
  c.warp_tiles = direct_warp_tiles(t);
  const int tiles = t.warps_k() * c.warp_tiles * t.block_strips;
  c.barriers = tiles * t.tile_bytes;
  c.norm_barrier = c.barriers + 8 * tiles;
  c.norm = (c.norm_barrier + 8 + 15) / 16 * 16;
  c.squares = c.norm + static_cast<int>(ceil_div(t.tiles, t.cluster())) * t.tile_k * 2;
  c.totals = c.squares + kVariantRows * kShares * 4;
  c.partial = (c.totals + kVariantRows * 4 + 127) / 128 * 128;
  c.joined = c.partial + t.warps_k() * t.block_strips * 1024;
  c.total = c.joined + (t.cluster() > 1 ? t.block_strips * 1024 : 0);
  return c;
}

SWIFTSPEC_HD int direct_blocks(const Tiling& t) {
  return static_cast<int>(ceil_div(ceil_div(t.half, kStrip / 2), t.block_strips)) * t.cluster();
}

// Tilings of kDirect for a shape. They have the tiling of kRing for launches of more rows.
SWIFTSPEC_HD bool direct_fits(const Tiling& t, const Device& device) {
  return t.group != 0 && direct_warp_tiles(t) <= kDirectTiles && t.tiles >= t.cluster() &&
         direct_smem_layout(t).total <= device.shared;
}

// Estimated nanoseconds of a launch with up to 8 rows. A guess that ranks the tilings to be timed; never measured.
SWIFTSPEC_HD int64_t direct_ns(const Tiling& t, const Device& device) {
  const int64_t warps = t.warps_k(), blocks = direct_blocks(t), multiprocessors = device.max_clusters[0];
  const int64_t by_shared = (2 * device.half_shared + 2048) / (direct_smem_layout(t).total + 1024), by_registers = 16 / warps;
  const int64_t at_once = multiprocessors * (by_shared < by_registers ? by_shared : by_registers);
  const int64_t waves = ceil_div(blocks, at_once), range = ceil_div(t.tiles, t.cluster());
  const int64_t memory = t.bytes() / (24 * multiprocessors);
  const int64_t inputs = blocks * range * t.tile_k * kVariantRows * 2 / (40 * multiprocessors);  // from L2
  const int64_t products = waves * (direct_warp_tiles(t) * t.block_strips * 480 + 800);
  const int64_t longer = memory > products ? memory : products;
  return 2000 + longer + inputs / 2 + (t.cluster() > 1 ? 1000 : 0);
}

}  // namespace swiftspec::cuda::tiles
