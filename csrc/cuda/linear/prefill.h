// Projections of long prefill chunks with wgmma: partition and layouts. For host code and device code.
//
// A CTA computes 128 or 256 outputs of 128 rows at a time. The m16k16 fragments that the four warps of a warpgroup pass to
// wgmma as rows of A are those of four strips, and B are 128 rows of x. With four strips per CTA one warpgroup computes
// fragment 0 of the strips and another one fragment 1, and the CTAs of a cluster split the inputs; partial sums are added
// CTA by CTA. With eight strips each warpgroup computes both fragments of four strips, which halves the accesses to L2
// per product, but large tiles leave multiprocessors idle if they are few.
//
// Slabs. pack_slabs_kernel writes the inputs of a tile for 128 rows as wgmma reads them from shared memory, so that one
// bulk copy fetches them: slabs of all tiles of the first 128 rows, then those of the next. A slab consists of one
// matrix [128 rows][64 inputs] for each 64 inputs. A row is a line of 128 bytes, whose eight 16-byte pieces are swizzled:
// piece c of row r is stored at place c ^ (r % 8). Positions within a row are columns of k16 steps (tiles::input_of).
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "cuda/device/device.h"
#include "cuda/linear/tiling.h"

namespace swiftspec::cuda::tiles {

// 64 rows take as long as 128 rows here, and longer in the kernels for fewer rows.
constexpr int64_t kMinPrefillRows = kMaxRows + 1;
constexpr int kNarrowLog = 2, kWideLog = 3;  // log2 of the strips of a CTA
constexpr int kTileRows = 128, kTileRows8 = kTileRows / 8;
constexpr int kLineBytes = 128;                           // of a row in a matrix of a slab
constexpr int kMatrixBytes = kTileRows * kLineBytes;
constexpr int kMaxPrefillStages = 8;
constexpr int kMaxPrefillClusterLog = 3;

SWIFTSPEC_HD int prefill_slab_bytes(const Tiling& t) { return t.tile_k * kTileRows * 2; }

// Offset in bytes within a slab of the operands of a row for half a k16 step: `high` 0: columns 0 to 7, 1: 8 to 15.
SWIFTSPEC_HD int slab_piece(int step, int high, int row) {
  return step / 4 * kMatrixBytes + row * kLineBytes + ((step % 4 * 2 + high) ^ row % 8) * 16;
}

// Offset within a slab at which the descriptor of a k16 step starts: that of row 0.
SWIFTSPEC_HD int slab_step(int step) { return step / 4 * kMatrixBytes + step % 4 * 32; }

// The descriptor of B (PTX ISA, "Matrix descriptor"): 8 lines lie 1024 bytes apart from the next 8, and pieces are
// swizzled within 128 bytes. `address`: in shared memory; that of line 0 is a multiple of 1024.
SWIFTSPEC_HD uint64_t operand_descriptor(uint32_t address) {
  constexpr uint64_t kUnused = 1, kEightLines = 8 * kLineBytes / 16, kSwizzle128 = 1;
  return (address & 0x3ffffu) >> 4 | kUnused << 16 | kEightLines << 32 | kSwizzle128 << 62;
}

// Shared-memory layout of a CTA, offsets in bytes. Offset 0 holds the slabs, which are aligned to their swizzle.
struct PrefillSmemLayout {
  int32_t ring, stages, sums, barriers, total;
};

SWIFTSPEC_HD PrefillSmemLayout prefill_smem_layout(const Tiling& t, const Device& device) {
  PrefillSmemLayout c{};
  const int slab = prefill_slab_bytes(t), weights = t.warps_n() * t.tile_bytes;
  const int sums = t.n_log == kWideLog ? 0 : t.warps_n() * kTileRows8 * 1024;
  const int barriers = (2 * kMaxPrefillStages + 2) * 8;
  const int stages = (device.shared - sums - barriers) / (slab + weights);
  c.stages = stages < kMaxPrefillStages ? stages : kMaxPrefillStages;
  c.ring = c.stages * slab;
  c.sums = c.ring + c.stages * weights;
  c.barriers = c.sums + sums;
  c.total = c.barriers + barriers;
  return c;
}

SWIFTSPEC_HD bool has_prefill_kernel(const Device& device) { return device.has_wgmma(); }

SWIFTSPEC_HD bool uses_prefill(const Device& device, int64_t rows) {
  return has_prefill_kernel(device) && rows >= kMinPrefillRows;
}

SWIFTSPEC_HD int32_t row_tiles(int64_t rows) { return static_cast<int32_t>(ceil_div(rows, kTileRows)); }

// Estimated time of a launch in multiprocessor cycles at the peak rate of wgmma. The efficiency and the time of the sum
// over a cluster and of the stores are guesses.
SWIFTSPEC_HD int64_t prefill_cycles(const Tiling& t, int64_t rows, const Device& device) {
  const bool wide = t.n_log == kWideLog;
  const int64_t tiles = static_cast<int64_t>(t.turns()) * row_tiles(rows);
  const int64_t inputs = ceil_div(t.tiles, t.cluster()) * t.tile_k;
  const int64_t products = wide ? inputs * 19 : inputs * 11, end = t.cluster_log == 0 ? 3000 : 4000;
  return ceil_div(tiles, device.max_clusters[t.cluster_log]) * (products + end);
}

// The tiling of a launch with the lowest estimated time; turns() are tiles of 128 or 256 outputs.
SWIFTSPEC_HD Tiling prefill_tiling(const Tiling& t, int64_t rows, const Device& device) {
  Tiling best = with_split(t, kWideLog, 0);
  for (int log = 0; log <= kMaxPrefillClusterLog; ++log) {
    const Tiling split = with_split(t, kNarrowLog, log);
    if (device.max_clusters[log] == 0 || t.tiles < split.cluster()) break;
    if (prefill_cycles(split, rows, device) < prefill_cycles(best, rows, device)) best = split;
  }
  return best;
}

}  // namespace swiftspec::cuda::tiles
