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
constexpr int kPairedStages = 3;      // the fewest of two blocks that share a multiprocessor
constexpr int kPairedRows8 = 2;       // rows / 8 up to which the registers allow two blocks per multiprocessor

constexpr int kVariantRows = 8;  // of a launch of kDirect or kStream
// Kernels of int4 projections with few rows that are not summed over ranks; linear.cu computes all others. Each adds in
// the order of the tiling, so that variants of one split are bitwise identical.
enum Variant : int32_t {
  kRing,    // linear.cu: resident blocks, a pipeline of tiles per warp
  kDirect,  // direct.cu: blocks that request all of their tiles first, and end
  kStream,  // stream.cu: resident blocks, whose strips no barrier separates
};

SWIFTSPEC_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of the next projection to prefetch to L2: a third of L2, and at most what an H200's memory delivers in 4 us.
// Both limits are guesses; attention takes 12 us and more on an H100.
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
  int32_t blocks_per_sm;  // 1 or 2, of launches with up to 8 * kPairedRows8 rows; results do not depend on it
  int32_t variant;        // a Variant; results do not depend on it
  int32_t block_strips;   // of kDirect: strips of a block
  // A `second` output lies `apart` outputs after its `first` one: `half`, or half a head (with_heads). `heads`: mask of the
  // bits of a pair's number that count heads, or 0.
  int64_t apart, heads;

  SWIFTSPEC_HD int groups() const { return tile_k / kBlock >> group_log; }  // of a tile
  SWIFTSPEC_HD int warps_n() const { return 1 << n_log; }
  SWIFTSPEC_HD int warps_k() const { return kWarps >> n_log; }
  SWIFTSPEC_HD int strip_of(int warp) const { return warp >> (3 - n_log); }  // among the strips of the CTA
  SWIFTSPEC_HD int share_of(int warp) const { return warp & (warps_k() - 1); }
  SWIFTSPEC_HD int cluster() const { return 1 << cluster_log; }
  SWIFTSPEC_HD int turns() const { return strips >> n_log; }  // iterations over all strips, summed over clusters
  // Bytes of the tiles of all strips, padded for every split, so that another one reads the same memory.
  SWIFTSPEC_HD int64_t bytes() const {
    return static_cast<int64_t>((strips + kWarps - 1) / kWarps * kWarps) * tiles * tile_bytes;
  }
  SWIFTSPEC_HD int first_tile(int cta) const { return tiles * cta >> cluster_log; }
  SWIFTSPEC_HD int range(int cta) const { return first_tile(cta + 1) - first_tile(cta); }
  SWIFTSPEC_HD int64_t tile_at(int strip, int tile) const {
    return static_cast<int64_t>(strip * tiles + tile) * tile_bytes;  // fewer than 2^31 tiles: two instructions
  }
};

SWIFTSPEC_HD Tiling shape(int64_t k, int64_t n, int group) {
  Tiling t{};
  t.n = n, t.k = k, t.half = t.apart = (n + 1) / 2, t.group = group;
  t.group_log = group == 128 ? 2 : group == 64 ? 1 : 0;
  t.tile_k = group != 0 ? 128 : 64;
  t.tile_bytes = group != 0 ? 4 * (kCodeWords + kStrip * (128 / group)) : kStrip * 64 * 2;
  t.tiles = static_cast<int32_t>(ceil_div(k, t.tile_k));
  t.strips = static_cast<int32_t>(ceil_div(t.half, kStrip / 2));
  return t;
}

// Sets the order of the outputs of a QKV projection with heads of 64 or 128 elements; a strip lies in one head.
SWIFTSPEC_HD Tiling with_heads(Tiling t, int head_dim) {
  t.apart = head_dim / 2, t.heads = -t.apart;
  return t;
}

// Sets the split: 1 << n_log strips at a time and 1 << cluster_log ranges of inputs.
SWIFTSPEC_HD Tiling with_split(Tiling t, int n_log, int cluster_log, int blocks_per_sm = 1) {
  t.n_log = n_log, t.cluster_log = cluster_log, t.blocks_per_sm = blocks_per_sm;
  t.strips = static_cast<int32_t>(ceil_div(t.strips, t.warps_n())) * t.warps_n();
  return t;
}

// Whether the blocks of a launch with 8 * rows8 rows share a multiprocessor in pairs.
SWIFTSPEC_HD bool is_paired(const Tiling& t, int rows8) { return t.blocks_per_sm == 2 && rows8 <= kPairedRows8; }

// Number of clusters of such a launch that run concurrently.
SWIFTSPEC_HD int concurrent_clusters(const Tiling& t, int rows8, const Device& device) {
  return (is_paired(t, rows8) ? device.max_paired_clusters : device.max_clusters)[t.cluster_log];
}

// Bytes of x in shared memory at a time with one block per multiprocessor; twice that for more than 16 rows. bf16
// weights leave less room, since their ring holds larger tiles.
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
SWIFTSPEC_HD int ring_stages(const Tiling& t, const Device& device, int ring, bool paired) {
  const int shared = paired || two_blocks_fit(t, device, ring) ? device.half_shared : device.shared;
  const int stages = shared > ring ? (shared - ring) / (kWarps * t.tile_bytes) : 0;
  return stages < kMaxStages ? stages : kMaxStages;
}

// `normed`: the projection has an RMSNorm. Its weight is kept in shared memory unless that would leave the ring fewer
// than min_stages or keep a second block off the multiprocessor. On Ampere it is not: no kernel starts early there, and
// L1 keeps what it has, since no cluster barrier empties it. Of two blocks per multiprocessor, x takes what the fewest
// stages leave.
SWIFTSPEC_HD SmemLayout smem_layout(const Tiling& t, int rows8, const Device& device, bool normed = false) {
  SmemLayout c{};
  const bool paired = is_paired(t, rows8);
  const int x_bytes = t.tile_k * rows8 * 16, sums_bytes = t.group != 0 ? t.groups() * rows8 * 8 * 4 : 0;  // of a tile
  const int partial_bytes = t.warps_k() > 1 ? kWarps * rows8 * 1024 : 0;
  c.joined_bytes = t.warps_n() * rows8 * 1024;  // two fragments of 512 bytes for each strip and 8 rows
  // without other CTAs that read it, the barrier after `partial` already separates two iterations: one buffer is enough
  const int buffers = t.cluster() == 1 && t.warps_k() > 1 ? 1 : 2;
  const int small_bytes = 2 * kMaxRows * 4 + kWarps * kMaxStages * 8;  // squares, scales, barriers
  const int range = static_cast<int>(ceil_div(ceil_div(t.tiles, t.cluster()), t.warps_k())) * t.warps_k();
  int most = chunk_bytes(t, device) * (rows8 <= 2 ? 1 : 2) / x_bytes;
  if (paired) {
    const int others = partial_bytes + buffers * c.joined_bytes + small_bytes + 256;  // 256: alignment
    const int left = device.half_shared - others - kPairedStages * kWarps * t.tile_bytes;
    most = left < 0 ? 0 : left / (x_bytes + sums_bytes) / t.warps_k() * t.warps_k();
  }
  c.chunk_tiles = range < most ? range : most;
  c.sums = c.chunk_tiles * x_bytes;
  c.partial = c.sums + c.chunk_tiles * sums_bytes;
  c.joined = c.partial + partial_bytes;
  c.squares = c.joined + buffers * c.joined_bytes;
  if (buffers == 1) c.joined_bytes = 0;  // the offset of the second buffer
  c.scales = c.squares + kMaxRows * 4;
  c.barriers = c.scales + kMaxRows * 4;
  c.norm_barrier = c.barriers + kWarps * kMaxStages * 8;
  c.norm = c.norm_barrier + 16;
  c.ring = (c.norm_barrier + 127) / 128 * 128;
  if (normed && device.arch >= 90) {
    const int bytes = static_cast<int>(ceil_div(t.tiles, t.cluster())) * t.tile_k * 2;
    const int ring = (c.norm + bytes + 127) / 128 * 128, stages = ring_stages(t, device, c.ring, paired);
    const int wanted = paired ? kPairedStages : device.min_stages;
    const bool enough = ring_stages(t, device, ring, paired) >= (stages < wanted ? stages : wanted);
    if (enough && (paired || two_blocks_fit(t, device, ring) == two_blocks_fit(t, device, c.ring))) {
      c.ring = ring, c.norm_bytes = bytes;
    }
  }
  c.stages = ring_stages(t, device, c.ring, paired);
  c.total = c.ring + c.stages * kWarps * t.tile_bytes;
  return c;
}

// Whether every number of rows leaves room for a ring and for chunks that the warps share evenly.
SWIFTSPEC_HD bool fits(const Tiling& t, const Device& device) {
  for (int rows8 = 1; rows8 <= kMaxRows / 8; rows8 *= 2) {
    const SmemLayout c = smem_layout(t, rows8, device);
    if (c.chunk_tiles < 1 || c.chunk_tiles % t.warps_k() != 0) return false;
    if (c.stages < (is_paired(t, rows8) ? kPairedStages : 1)) return false;
  }
  return true;
}

// Estimated nanoseconds of a launch with 8 * rows8 rows, fitted to 512 measurements of 16 int4 projections with 8 rows
// on an H100 (bench/log, 2026-11-26); the terms of more rows and of bf16 are guesses. A block first stages x; inputs
// that exceed its shared memory are staged again in every iteration. A tile's instructions depend on each other, so that it
// takes a warp little longer if a second block shares the scheduler. An iteration ends with barriers, the sum over the
// cluster, and the stores. Copies fill the ring meanwhile, and memory and products overlap in part.
SWIFTSPEC_HD int64_t launch_ns(const Tiling& t, int rows8, const Device& device) {
  const SmemLayout smem = smem_layout(t, rows8, device);
  const bool paired = is_paired(t, rows8);
  const int64_t clusters = concurrent_clusters(t, rows8, device), rounds = ceil_div(t.turns(), clusters);
  const int64_t range = ceil_div(t.tiles, t.cluster()), chunks = ceil_div(range, smem.chunk_tiles);
  const int64_t staging = 3000 + (chunks == 1 ? 1 : rounds) * (500 * chunks + range * t.tile_k * rows8 * 4 / 5);
  const int64_t tile = (t.group != 0 ? 250 + 230 * rows8 : 150 + 150 * rows8) * (paired ? 14 : 10) / 10;
  const int64_t end = t.cluster() > 1 ? 1800 + 90 * t.cluster() : 1450;  // of an iteration
  const int64_t products = rounds * (ceil_div(range, t.warps_k()) * tile + end);
  const int64_t bytes_per_ns = 24 * static_cast<int64_t>(device.max_clusters[0]);  // of the whole device
  const int64_t ring = static_cast<int64_t>(smem.stages) * kWarps * t.tile_bytes * clusters * t.cluster();
  const int64_t memory = t.bytes() / bytes_per_ns;
  const int64_t ahead = staging < ring / bytes_per_ns ? staging : ring / bytes_per_ns;  // of memory, during the staging
  const int64_t left = memory < ahead ? 0 : memory - ahead;
  const int64_t longer = products > left ? products : left, shorter = products > left ? left : products;
  return staging + longer + shorter * 2 / 5;
}

// The cost of a tiling: launches of few rows count most.
SWIFTSPEC_HD int64_t estimated_ns(const Tiling& t, const Device& device) {
  return (8 * launch_ns(t, 1, device) + 2 * launch_ns(t, 2, device) + launch_ns(t, 4, device)) / 11;
}

// The tiling with the lowest estimated cost among those that fit the device. group: 32, 64, 128, or 0 for bf16.
SWIFTSPEC_HD Tiling tiling_for(int64_t k, int64_t n, int group, const Device& device) {
  Tiling best{};
  for (int i = 0; i < 32; ++i) {
    const Tiling t = with_split(shape(k, n, group), i % 4, i / 4 % 4, 1 + i / 16);
    if (concurrent_clusters(t, 1, device) == 0 || concurrent_clusters(t, 4, device) == 0 || !fits(t, device)) continue;
    if (best.n == 0 || estimated_ns(t, device) < estimated_ns(best, device)) best = t;
  }
  return best;
}

// Iterates over the tiles of one warp, in order.
struct TileIterator {
  int32_t strip, strip_step, strips;
  int32_t first, last, step, tile;  // of a strip

  SWIFTSPEC_HD bool done() const { return strip >= strips; }
  SWIFTSPEC_HD void next() {
    tile += step;
    if (tile < last) return;
    tile = first;
    strip += strip_step;
  }
};

// Warps of one strip are adjacent. The iterations are distributed round-robin over `clusters` clusters.
SWIFTSPEC_HD TileIterator tiles_of_warp(const Tiling& t, int cluster, int clusters, int cta, int warp) {
  const int first = t.first_tile(cta) + t.share_of(warp), last = t.first_tile(cta + 1);
  const int strip = first < last ? (cluster << t.n_log) + t.strip_of(warp) : t.strips;  // no tiles: done
  return {strip, clusters << t.n_log, t.strips, first, last, t.warps_k(), first};
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
#ifdef SWIFTSPEC_STAMPS
  const uint8_t* touched = nullptr;  // memory whose pages this projection touches, see stamps.cuh
  int64_t touched_bytes = 0;
#endif
};

}  // namespace swiftspec::cuda
