// Tiling of a projection: the partition of the work over clusters, CTAs and warps, and the layout of shared memory.
// Arithmetic only, for host code and device code. tiles.h defines the tiles.
//
// A cluster of CTAs computes `warps_n` strips at a time; its CTAs split the inputs into ranges, and the `warps_k` warps
// of a strip take the tiles of a range round-robin. Partial sums are added warp by warp, then CTA by CTA. The tiling
// depends only on the shape of the weight and on the device: neither the number of rows nor the grid size changes a
// row's result.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "cuda/device/device.h"

namespace swiftspec::cuda::tiles {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStrip = 32;            // outputs of a strip
constexpr int kBlock = 32;            // inputs that are permuted together
constexpr int kMaxRows = 32;          // of one launch
constexpr int kCodeWords = 512;       // of an int4 tile; its scales and zero points follow
constexpr int kMaxStages = 16;        // tiles in flight per warp

SWIFTSPEC_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of the next projection to prefetch to L2: a third of L2, and at most what an H200's memory delivers in the 4 us
// that attention takes. An estimate, not measured.
SWIFTSPEC_HD int64_t prefetch_bytes(const Device& device) {
  const int64_t third = device.l2 / 3 / 128 * 128, most = 16 << 20;
  return third < most ? third : most;
}

// Splits `bytes` (a multiple of 128, as all tiles are) into `parts` slices of whole cache lines.
struct Slice {
  int64_t first, bytes;
};
SWIFTSPEC_HD int64_t slice_bytes(int64_t bytes, int64_t parts) { return ceil_div(bytes, 128 * parts) * 128; }
SWIFTSPEC_HD Slice slice_of(int64_t bytes, int64_t each, int64_t part) {
  const int64_t first = each * part < bytes ? each * part : bytes;
  return {first, bytes - first < each ? bytes - first : each};
}

// The shape of a weight and its tiling.
struct Tiling {
  int64_t n, k, half;  // outputs, inputs, and the number of `first` outputs
  int32_t group;       // inputs of an int4 group: 32, 64 or 128; 0: bf16
  int32_t group_log;   // its blocks are 1 << group_log
  int32_t tile_k, tile_bytes;
  int32_t tiles;        // per strip
  int32_t strips;       // a multiple of warps_n(); the last may be padding
  int32_t n_log;        // strips that a CTA computes at a time: 1 << n_log
  int32_t cluster_log;  // CTAs that share the inputs: 1 << cluster_log

  SWIFTSPEC_HD int groups() const { return tile_k / kBlock >> group_log; }  // of a tile
  SWIFTSPEC_HD int warps_n() const { return 1 << n_log; }
  SWIFTSPEC_HD int warps_k() const { return kWarps >> n_log; }
  SWIFTSPEC_HD int strip_of(int warp) const { return warp >> (3 - n_log); }  // among the strips of the CTA
  SWIFTSPEC_HD int share_of(int warp) const { return warp & (warps_k() - 1); }
  SWIFTSPEC_HD int cluster() const { return 1 << cluster_log; }
  SWIFTSPEC_HD int turns() const { return strips >> n_log; }  // iterations over all strips, summed over clusters
  SWIFTSPEC_HD int64_t bytes() const { return static_cast<int64_t>(strips) * tiles * tile_bytes; }
  SWIFTSPEC_HD int first_tile(int cta) const { return tiles * cta >> cluster_log; }
  SWIFTSPEC_HD int range(int cta) const { return first_tile(cta + 1) - first_tile(cta); }
  SWIFTSPEC_HD int64_t tile_at(int strip, int tile) const {
    return (static_cast<int64_t>(strip) * tiles + tile) * tile_bytes;
  }
};

SWIFTSPEC_HD Tiling shape(int64_t k, int64_t n, int group) {
  Tiling t{};
  t.n = n, t.k = k, t.half = (n + 1) / 2, t.group = group;
  t.group_log = group == 128 ? 2 : group == 64 ? 1 : 0;
  t.tile_k = group != 0 ? 128 : 64;
  t.tile_bytes = group != 0 ? 4 * (kCodeWords + kStrip * (128 / group)) : kStrip * 64 * 2;
  t.tiles = static_cast<int32_t>(ceil_div(k, t.tile_k));
  t.strips = static_cast<int32_t>(ceil_div(t.half, kStrip / 2));
  return t;
}

// Sets the split: 1 << n_log strips at a time and 1 << cluster_log ranges of inputs.
SWIFTSPEC_HD Tiling with_split(Tiling t, int n_log, int cluster_log) {
  t.n_log = n_log, t.cluster_log = cluster_log;
  t.strips = static_cast<int32_t>(ceil_div(t.strips, t.warps_n())) * t.warps_n();
  return t;
}

// Bytes of x in shared memory at a time; twice that for more than 16 rows. bf16 weights leave less room, since their
// ring holds larger tiles.
SWIFTSPEC_HD int chunk_bytes(const Tiling& t, const Device& device) {
  return device.shared >= 160 << 10 ? 32768 : t.group != 0 ? 16384 : 8192;
}

// Shared-memory layout of a CTA that computes 8 * rows8 rows; offsets in bytes. A chunk of x is a number of tiles that
// the warps of a strip share evenly, so chunking does not change the assignment of tiles to warps.
struct SmemLayout {
  int32_t chunk_tiles;
  int32_t x, sums, partial, joined, joined_bytes, squares, scales, barriers, norm_barrier;
  int32_t norm, norm_bytes;  // of the CTA's part of the RMSNorm weight; 0: it stays in global memory
  int32_t ring, stages, total;
};

// Whether two blocks whose rings begin at `ring` share a multiprocessor, each with enough stages.
SWIFTSPEC_HD bool two_blocks_fit(const Tiling& t, const Device& device, int ring) {
  return ring + device.min_stages * kWarps * t.tile_bytes <= device.half_shared;
}
SWIFTSPEC_HD int ring_stages(const Tiling& t, const Device& device, int ring) {
  const int shared = two_blocks_fit(t, device, ring) ? device.half_shared : device.shared;
  const int stages = (shared - ring) / (kWarps * t.tile_bytes);
  return stages < kMaxStages ? stages : kMaxStages;
}

// `normed`: the projection has an RMSNorm. Its weight is kept in shared memory unless that would leave the ring fewer
// than min_stages or keep a second block off the multiprocessor. On Ampere it is not: no kernel starts early there, and
// L1 keeps what it has, since no cluster barrier empties it.
SWIFTSPEC_HD SmemLayout smem_layout(const Tiling& t, int rows8, const Device& device, bool normed = false) {
  SmemLayout c{};
  const int x_bytes = t.tile_k * rows8 * 16, most = chunk_bytes(t, device) * (rows8 <= 2 ? 1 : 2);
  const int range = static_cast<int>(ceil_div(ceil_div(t.tiles, t.cluster()), t.warps_k())) * t.warps_k();
  c.chunk_tiles = range < most / x_bytes ? range : most / x_bytes;
  const int groups = t.group != 0 ? c.chunk_tiles * t.groups() : 0;
  c.joined_bytes = t.warps_n() * rows8 * 1024;  // two fragments of 512 bytes for each strip and 8 rows
  c.sums = c.chunk_tiles * x_bytes;
  c.partial = c.sums + groups * rows8 * 8 * 4;
  c.joined = c.partial + (t.warps_k() > 1 ? kWarps * rows8 * 1024 : 0);
  // without other CTAs that read it, the barrier after `partial` already separates two iterations: one buffer is enough
  const int buffers = t.cluster() == 1 && t.warps_k() > 1 ? 1 : 2;
  c.squares = c.joined + buffers * c.joined_bytes;
  if (buffers == 1) c.joined_bytes = 0;  // the offset of the second buffer
  c.scales = c.squares + kMaxRows * 4;
  c.barriers = c.scales + kMaxRows * 4;
  c.norm_barrier = c.barriers + kWarps * kMaxStages * 8;
  c.norm = c.norm_barrier + 16;
  c.ring = (c.norm_barrier + 127) / 128 * 128;
  if (normed && device.arch >= 90) {
    const int bytes = static_cast<int>(ceil_div(t.tiles, t.cluster())) * t.tile_k * 2;
    const int ring = (c.norm + bytes + 127) / 128 * 128, stages = ring_stages(t, device, c.ring);
    const bool enough = ring_stages(t, device, ring) >= (stages < device.min_stages ? stages : device.min_stages);
    if (enough && two_blocks_fit(t, device, ring) == two_blocks_fit(t, device, c.ring)) {
      c.ring = ring, c.norm_bytes = bytes;
    }
  }
  c.stages = ring_stages(t, device, c.ring);
  c.total = c.ring + c.stages * kWarps * t.tile_bytes;
  return c;
}

// Whether every number of rows leaves room for a ring and for chunks that the warps share evenly.
SWIFTSPEC_HD bool fits(const Tiling& t, const Device& device) {
  for (int rows8 = 1; rows8 <= kMaxRows / 8; rows8 *= 2) {
    const SmemLayout c = smem_layout(t, rows8, device);
    if (c.stages < 1 || c.chunk_tiles < 1 || c.chunk_tiles % t.warps_k() != 0) return false;
  }
  return true;
}

// Estimated nanoseconds that one CTA spends on its share with 8 rows. The constants model an H200 (per SM and
// nanosecond, 33 bytes of weights and 64 bytes of x) and are not measured. Inputs that exceed the shared memory are
// loaded again in every iteration.
SWIFTSPEC_HD int64_t estimated_ns(const Tiling& t, const Device& device) {
  const int64_t most_inputs = chunk_bytes(t, device) / 16,
                rounds = ceil_div(t.turns(), device.max_clusters[t.cluster_log]);
  const int64_t range = ceil_div(t.tiles, t.cluster()), inputs = range * t.tile_k;
  const int64_t stream = rounds * ceil_div(range, t.warps_k()) * kWarps * t.tile_bytes / 33;
  const int64_t stagings = inputs <= most_inputs ? 1 : rounds * ceil_div(inputs, most_inputs);
  const int64_t rows = stagings * (300 + (inputs < most_inputs ? inputs : most_inputs) * 16 / 64);
  return stream + rows + rounds * (t.cluster() > 1 ? 300 : 100);
}

// The tiling with the lowest estimated cost among those that fit the device. group: 32, 64, 128, or 0 for bf16.
SWIFTSPEC_HD Tiling tiling_for(int64_t k, int64_t n, int group, const Device& device) {
  Tiling best{};
  for (int i = 0; i < 16; ++i) {
    const Tiling t = with_split(shape(k, n, group), i / 4, i % 4);
    if (device.max_clusters[i % 4] == 0 || !fits(t, device)) continue;
    if (best.n == 0 || estimated_ns(t, device) < estimated_ns(best, device)) best = t;
  }
  return best;
}

// Iterates over the tiles of one warp, in order.
struct TileIterator {
  int32_t strip, strip_step, strips;
  int32_t first, last, step, tile;  // of a strip

  SWIFTSPEC_HD bool done() const { return strip >= strips || first >= last; }
  SWIFTSPEC_HD void next() {
    tile += step;
    if (tile < last) return;
    tile = first;
    strip += strip_step;
  }
};

// Warps of one strip are adjacent. The iterations are distributed round-robin over `clusters` clusters.
SWIFTSPEC_HD TileIterator tiles_of_warp(const Tiling& t, int cluster, int clusters, int cta, int warp) {
  const int first = t.first_tile(cta) + t.share_of(warp);
  return {(cluster << t.n_log) + t.strip_of(warp), clusters << t.n_log, t.strips, first, t.first_tile(cta + 1),
          t.warps_k(), first};
}

}  // namespace swiftspec::cuda::tiles

namespace swiftspec::cuda {

// A projection's packed weights on one device.
struct Weights {
  Device device;  // that the tiling was chosen for
  tiles::Tiling tiling;
  const void* data;   // tiling.bytes() of tiles
  const float* bias;  // [n], or null
  // Tiles of a following projection that this one prefetches to L2 when its own weights have been read; or null.
  const uint8_t* next = nullptr;
  int64_t next_bytes = 0;  // at most prefetch_bytes
};

}  // namespace swiftspec::cuda
