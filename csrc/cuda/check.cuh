// Turns a CUDA error into a std::runtime_error that names the launch.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace swiftspec::cuda {

inline void check(cudaError_t error, const char* where) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(where) + ": " + cudaGetErrorString(error));
  }
}

}  // namespace swiftspec::cuda
