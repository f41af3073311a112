// Kernel launches with attributes, and their occupancy.
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <string_view>

#include "cuda/check.cuh"
#include "cuda/device/device.h"
#include "kernels_cuda.h"

namespace swiftspec::cuda {

struct Launch {
  dim3 grid;
  int threads;
  int cluster = 0;        // blocks per cluster, consecutive in x; 0 or 1: no clusters
  int64_t shared = 0;     // bytes of dynamic shared memory
  bool early = false;     // may start before the previous kernel has ended; see ptx::wait_for_dependencies
  bool cooperative = false;  // all blocks run concurrently
};

// Whether programmatic dependent launch may be used. SWIFTSPEC_EARLY_STARTS=0 disables it, for measurements and
// debugging.
inline bool early_launch_enabled() {
  static const char* value = std::getenv("SWIFTSPEC_EARLY_STARTS");
  return value == nullptr || std::string_view(value) != "0";
}

// A cudaLaunchConfig_t with the attributes of a Launch.
class LaunchConfig {
 public:
  LaunchConfig(const Launch& how, Stream stream) {
    config_.gridDim = how.grid;
    config_.blockDim = dim3(static_cast<unsigned>(how.threads));
    config_.dynamicSmemBytes = static_cast<size_t>(how.shared);
    config_.stream = stream;
    config_.attrs = attributes_;
    if (how.cluster > 1) {
      add(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
    }
    if (how.early && early_launch_enabled() && device_info().has_early_launch()) {
      add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
    }
    if (how.cooperative) add(cudaLaunchAttributeCooperative).cooperative = 1;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;
  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& next = attributes_[config_.numAttrs++];
    next.id = id;
    return next.val;
  }

  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[3]{};
};

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Launch& how, Stream stream, Arguments... arguments) {
  check(cudaLaunchKernelEx(LaunchConfig(how, stream).get(), kernel, Parameters(arguments)...), name);
}

// Number of clusters of this kind that run concurrently on the current device.
template <class... Parameters>
int max_active_clusters(const char* name, void (*kernel)(Parameters...), const Launch& how) {
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, LaunchConfig(how, nullptr).get()), name);
  return count;
}

// Allows `bytes` of dynamic shared memory and requests the largest shared-memory carveout: an SM with a smaller
// carveout would have to drain before blocks that need more could start early on it.
template <class... Parameters>
void allow_shared_memory(const char* name, void (*kernel)(Parameters...), int64_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), name);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        name);
}

}  // namespace swiftspec::cuda
