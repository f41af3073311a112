// Launches with attributes, and which of them fit.
#pragma once

#include <cuda_runtime.h>

#include "check.cuh"
#include "kernels.h"

namespace swiftspec::cuda {

struct Launch {
  dim3 grid;
  int threads;
  int cluster = 0;        // so many blocks, neighbours in x, reach each other's shared memory; 0: each has its own
  int64_t shared = 0;     // bytes of dynamic shared memory
  bool early = false;     // may start before the kernel in front of it has ended; see ptx::wait_for_dependencies
  bool together = false;  // all blocks run at the same time
};

// A launch as CUDA wants it.
class Config {
 public:
  Config(const Launch& how, Stream stream) {
    config_.gridDim = how.grid;
    config_.blockDim = dim3(static_cast<unsigned>(how.threads));
    config_.dynamicSmemBytes = static_cast<size_t>(how.shared);
    config_.stream = stream;
    config_.attrs = attributes_;
    if (how.cluster > 0) {
      add(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
    }
    if (how.early) add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
    if (how.together) add(cudaLaunchAttributeCooperative).cooperative = 1;
  }
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;
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
  check(cudaLaunchKernelEx(Config(how, stream).get(), kernel, Parameters(arguments)...), name);
}

// How many clusters of this kind run at the same time.
template <class... Parameters>
int clusters_at_a_time(const char* name, void (*kernel)(Parameters...), const Launch& how) {
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, Config(how, nullptr).get()), name);
  return count;
}

template <class... Parameters>
void allow_shared(const char* name, void (*kernel)(Parameters...), int64_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), name);
}

}  // namespace swiftspec::cuda
