// What of a GPU the kernels are cut for: numbers, so that host code and tests cut for any GPU.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace swiftspec::cuda {

struct Device {
  int32_t arch;         // 10 major + minor
  int32_t shared;       // bytes of shared memory that a block may have
  int32_t half_shared;  // that each of two blocks on one multiprocessor may have
  int64_t l2;           // bytes of its L2 cache
  int32_t
      max_clusters[4];  // clusters of 1, 2, 4 and 8 blocks that run at a time, a multiprocessor to each block; 0: none
  int32_t min_stages = 4;  // tiles of weights under way for each warp, with which two blocks share a multiprocessor

  // Bulk copies, and launches that start before the one in front has ended.
  SWIFTSPEC_HD bool has_early_launch() const { return arch >= 90; }
  // Whether the kernels use clusters: those of compute capability 12 do without.
  SWIFTSPEC_HD bool has_clusters() const { return arch >= 90 && arch < 120; }
};

// The current device's; asked of the driver once for each.
const Device& device_info();

}  // namespace swiftspec::cuda
