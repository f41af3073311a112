// Checks and conversions of the arguments of CUDA operators.
#pragma once

#include <cstdint>
#include <string>

#include "bind/arguments.h"
#include "kernels_cuda.h"

namespace swiftspec::binding {

// The device that arrays must be on: the current GPU, or the CPU if the GPU is emulated (tests/simt).
Device gpu();

// Checks that an address is aligned to `bytes`.
inline void* aligned(const char* name, void* address, uintptr_t bytes = 16) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    throw py::value_error(std::string(name) + " is not aligned to " + std::to_string(bytes) + " bytes");
  }
  return address;
}

// The address of a bfloat16 array, aligned for vector loads.
inline void* bfloat16_arg(const char* name, const Array& array, Device device, Shape shape) {
  return aligned(name, array.at<Bfloat16>(device, name, shape));
}

inline cuda::Stream stream_arg(uintptr_t address) { return reinterpret_cast<cuda::Stream>(address); }

inline bool int32_sized(int64_t value) { return value >= 0 && value <= kMaxSize; }

}  // namespace swiftspec::binding
