// Projections by a stream of tiles that no barrier of a block or a cluster interrupts (Variant kStream): layout and
// estimated time. For host code and device code.
//
// A cluster computes one strip at a time; all eight warps of its blocks share the inputs. A warp that has multiplied its
// tiles of a strip stores its sums, arrives at an mbarrier, and goes on with the next strip. One strip later, one of the
// warps of each block adds the sums of its block and sends them to the block that owns the strip, where another strip
// later one of the warps adds those of the cluster and stores the results. All inputs of a block stay in shared memory.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "cuda/device/device.h"
#include "cuda/linear/tiling.h"

namespace swiftspec::cuda::tiles {

constexpr int kStreamSlots = 2;    // strips whose sums are kept
constexpr int kMinStreamStages = 3;

// mbarriers of a block, each for kStreamSlots slots: sums of all warps are stored; they are added; sums of the cluster
// have arrived; those that this block has sent to an owner are added.
struct StreamBarriers {
  static constexpr int kStored = 0, kAdded = kStreamSlots, kArrived = 2 * kStreamSlots, kSent = 3 * kStreamSlots;
  SWIFTSPEC_HD static int sent(int owner, int slot) { return kSent + owner * kStreamSlots + slot; }
  SWIFTSPEC_HD static int count(int ctas) { return kSent + ctas * kStreamSlots; }
};

// The layout of linear.cuh for all inputs of a block: `partial` are the sums of the warps [slot][warp], `joined` those of
// the cluster [slot][CTA]. `barriers_at` receives the offset of StreamBarriers.
SWIFTSPEC_HD SmemLayout stream_smem_layout(const Tiling& t, const Device& device, bool normed, int& barriers_at) {
  SmemLayout c{};
  c.chunk_tiles = static_cast<int>(ceil_div(t.tiles, t.cluster()));
  c.sums = c.chunk_tiles * t.tile_k * kVariantRows * 2;
  c.partial = c.sums + c.chunk_tiles * t.groups() * kVariantRows * 4;
  c.joined = c.partial + kStreamSlots * kWarps * 1024;
  c.squares = c.joined + (t.cluster() > 1 ? kStreamSlots * t.cluster() * 1024 : 0);
  c.scales = c.squares + kMaxRows * 4;
  c.barriers = c.scales + kMaxRows * 4;
  c.norm_barrier = c.barriers + kWarps * kMaxStages * 8;
  barriers_at = c.norm_barrier + 16;
  c.norm = (barriers_at + 8 * StreamBarriers::count(t.cluster()) + 15) / 16 * 16;
  c.norm_bytes = normed && device.arch >= 90 ? c.chunk_tiles * t.tile_k * 2 : 0;
  c.ring = (c.norm + c.norm_bytes + 127) / 128 * 128;
  const int shared = t.blocks_per_sm == 2 ? device.half_shared : device.shared;
  const int stages = shared > c.ring ? (shared - c.ring) / (kWarps * t.tile_bytes) : 0;
  c.stages = stages < kMaxStages ? stages : kMaxStages;
  c.total = c.ring + c.stages * kWarps * t.tile_bytes;
  return c;
}

// A warp per eight tiles, and enough stages, with a norm or without.
SWIFTSPEC_HD bool stream_fits(const Tiling& t, const Device& device) {
  int barriers_at = 0;
  return t.group != 0 && t.n_log == 0 && t.tiles >= t.cluster() && (t.cluster() == 1 || device.has_clusters()) &&
         stream_smem_layout(t, device, true, barriers_at).stages >= kMinStreamStages;
}

// Estimated nanoseconds of a launch with up to 8 rows. A guess that ranks the tilings to be timed; never measured.
SWIFTSPEC_HD int64_t stream_ns(const Tiling& t, const Device& device) {
  const int64_t clusters = concurrent_clusters(t, 1, device), rounds = ceil_div(ceil_div(t.half, kStrip / 2), clusters);
  const int64_t range = ceil_div(t.tiles, t.cluster()), tile = t.blocks_per_sm == 2 ? 670 : 480;
  const int64_t products = rounds * (ceil_div(range, kWarps) * tile + 100);
  const int64_t memory = t.bytes() / (24 * static_cast<int64_t>(device.max_clusters[0]));
  const int64_t longer = products > memory ? products : memory, shorter = products > memory ? memory : products;
  return 4000 + range * t.tile_k * 4 / 5 + longer + shorter / 5;
}

}  // namespace swiftspec::cuda::tiles
