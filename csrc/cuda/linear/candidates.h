// Tilings among which a GPU chooses by timing them (swiftspec/backends/cuda/tuner.py). For host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cuda/linear/direct.h"
#include "cuda/linear/stream.h"
#include "cuda/linear/tiling.h"

namespace swiftspec::cuda::tiles {

// What distinguishes the tilings of a shape: variant, CTAs of a cluster, warps of a strip, strips of a block, blocks per
// multiprocessor. Equal rows are equal tilings on every GPU.
using TilingRow = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>;
inline TilingRow row_of(const Tiling& t) {
  const int strips = t.variant == kDirect ? t.block_strips : t.warps_n();
  return {t.variant, t.cluster(), t.warps_k(), strips, t.blocks_per_sm};
}

// Estimated cost for up to 32 rows, weighted as by estimated_ns.
inline int64_t candidate_ns(const Tiling& t, const Device& device) {
  if (t.variant == kRing) return estimated_ns(t, device);
  const int64_t few = t.variant == kDirect ? direct_ns(t, device) : stream_ns(t, device);
  return (8 * few + 2 * launch_ns(t, 2, device) + launch_ns(t, 4, device)) / 11;
}

// All tilings of a shape that fit the device, those with the lowest estimated cost first.
inline std::vector<Tiling> all_tilings(int64_t k, int64_t n, int group, const Device& device) {
  std::vector<Tiling> found;
  for (int i = 0; i < 32; ++i) {
    const Tiling ring = with_split(shape(k, n, group), i % 4, i / 4 % 4, 1 + i / 16);
    if (concurrent_clusters(ring, 1, device) == 0 || concurrent_clusters(ring, 4, device) == 0 || !fits(ring, device)) {
      continue;
    }
    found.push_back(ring);
    Tiling stream = ring;
    stream.variant = kStream;
    if (stream_fits(stream, device)) found.push_back(stream);
    for (const DirectShape& of : kDirectShapes) {
      Tiling direct = ring;
      direct.variant = kDirect, direct.block_strips = of.strips;
      if (of.warps == ring.warps_k() && direct_fits(direct, device)) found.push_back(direct);
    }
  }
  std::stable_sort(found.begin(), found.end(), [&](const Tiling& a, const Tiling& b) {
    return candidate_ns(a, device) < candidate_ns(b, device);
  });
  return found;
}

// The default, then up to `each` other tilings of each variant.
inline std::vector<Tiling> candidates(int64_t k, int64_t n, int group, const Device& device, int each) {
  std::vector<Tiling> found{tiling_for(k, n, group, device)};
  int count[kStream + 1] = {};
  for (const Tiling& t : all_tilings(k, n, group, device)) {
    if (row_of(t) != row_of(found[0]) && count[t.variant]++ < each) found.push_back(t);
  }
  return found;
}

}  // namespace swiftspec::cuda::tiles
