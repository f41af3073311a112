// Launches with attributes.
#pragma once

#include <cuda_runtime.h>

#include "check.cuh"
#include "kernels.h"

namespace swiftspec::cuda {

inline cudaLaunchAttribute early() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Launches a kernel that may start before the one in front of it has ended; see ptx::wait_for_dependencies.
template <class... Parameters, class... Arguments>
void launch_early(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads, Stream stream,
                  Arguments... arguments) {
  cudaLaunchAttribute attribute = early();
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

}  // namespace swiftspec::cuda
