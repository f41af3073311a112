// Device properties that determine how the kernels are partitioned. Plain numbers, so that tests can use any GPU's.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace swiftspec::cuda {

struct Device {
  int32_t arch;         // 10 major + minor
  int32_t shared;       // bytes of shared memory that a block may have
  int32_t half_shared;  // the same for each of two blocks on one multiprocessor
  int64_t l2;           // bytes of the L2 cache
  // Number of clusters of 1, 2, 4 and 8 blocks that run concurrently, with one block per multiprocessor
  int32_t max_clusters[4];
  // A launch with one block per multiprocessor leaves room for a block of the next one if that leaves each of its warps
  // at least this number of weight tiles in flight.
  int32_t min_stages = 4;
  int32_t driver = 12040;  // CUDA version that the driver supports, 1000 major + 10 minor
  int32_t max_paired_clusters[4] = {};  // as max_clusters, with two blocks of half_shared bytes per multiprocessor

  // Programmatic dependent launch. Older drivers cannot capture it in graphs.
  SWIFTSPEC_HD bool has_early_launch() const { return arch >= 90 && driver >= 12040; }
  // Whether the kernels use clusters; those for compute capability 12 do not.
  SWIFTSPEC_HD bool has_clusters() const { return arch >= 90 && arch < 120; }
  // wgmma, which later architectures do not have.
  SWIFTSPEC_HD bool has_wgmma() const { return arch == 90; }
};

// The part of a device of this many multiprocessors, for launches that leave the others to another model. The blocks of
// both find room at the same time; which multiprocessors they get is up to the device.
SWIFTSPEC_HD Device part_of(Device device, int multiprocessors) {
  const int64_t all = device.max_clusters[0];
  for (int log = 0; log < 4; ++log) {
    device.max_clusters[log] = static_cast<int32_t>(device.max_clusters[log] * multiprocessors / all);
    device.max_paired_clusters[log] = static_cast<int32_t>(device.max_paired_clusters[log] * multiprocessors / all);
  }
  return device;
}

// Properties of the current device; queried once per device.
const Device& device_info();

}  // namespace swiftspec::cuda
