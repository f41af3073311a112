#include "cuda/device/device.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <stdexcept>

#include "cuda/launch.cuh"

namespace swiftspec::cuda {
namespace {

constexpr int kThreads = 256;    // of the blocks in the occupancy query; their shared memory is the limit
constexpr int kReserved = 1024;  // bytes of shared memory that the system reserves per block

__global__ void __launch_bounds__(kThreads) empty_kernel() {}

int attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, ordinal), "device");
  return value;
}

// Number of clusters of `blocks` blocks that run concurrently. It does not follow from the number of multiprocessors: a
// cluster lies within one GPC, GPCs have different numbers of multiprocessors, and dies differ.
int clusters_of(int blocks, int shared) {
  const Launch how{.grid = dim3(static_cast<unsigned>(blocks)), .threads = kThreads, .cluster = blocks,
                   .shared = shared};
  return max_active_clusters("device", empty_kernel, how);
}

Device query_device(int ordinal) {
  Device d{};
  d.arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor, ordinal) +
           attribute(cudaDevAttrComputeCapabilityMinor, ordinal);
  d.shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
  d.half_shared = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, ordinal) / 2 - kReserved;
  d.l2 = attribute(cudaDevAttrL2CacheSize, ordinal);
  check(cudaDriverGetVersion(&d.driver), "device");
  d.max_clusters[0] = attribute(cudaDevAttrMultiProcessorCount, ordinal);
  d.max_paired_clusters[0] = 2 * d.max_clusters[0];
  if (!d.has_clusters()) return d;
  allow_shared_memory("device", empty_kernel, d.shared);
  for (int log = 1; log < 4; ++log) {
    d.max_clusters[log] = clusters_of(1 << log, d.shared);
    d.max_paired_clusters[log] = clusters_of(1 << log, d.half_shared);
  }
  if (d.max_clusters[3] < 1)
    throw std::runtime_error("this GPU, or the part of it that is lent, holds no cluster of 8 blocks");
  return d;
}

}  // namespace

const Device& device_info() {
  static std::mutex lock;
  static std::map<int, Device> known;
  int ordinal = 0;
  check(cudaGetDevice(&ordinal), "device");
  const std::lock_guard<std::mutex> mine(lock);
  const auto found = known.find(ordinal);
  return found != known.end() ? found->second : known.emplace(ordinal, query_device(ordinal)).first->second;
}

}  // namespace swiftspec::cuda
