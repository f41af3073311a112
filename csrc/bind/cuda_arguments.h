// What a Python call hands over to a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "bind/arguments.h"
#include "kernels_cuda.h"

namespace swiftspec::binding {

// Where arrays must lie: on the current GPU, or, where a GPU is emulated (tests/simt), on the CPU.
Device gpu();

// An address whose memory is read so many bytes at a time.
inline void* aligned(const char* name, void* address, uintptr_t bytes = 16) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    throw py::value_error(std::string(name) + " is not aligned to " + std::to_string(bytes) + " bytes");
  }
  return address;
}

// Bfloat16 as kernels read it.
inline void* bfloat16_arg(const char* name, const Array& array, Device device, Shape shape) {
  return aligned(name, array.at<Bfloat16>(device, name, shape));
}

inline cuda::Stream stream_arg(uintptr_t address) { return reinterpret_cast<cuda::Stream>(address); }

inline bool int32_sized(int64_t value) { return value >= 0 && value <= kMaxSize; }

}  // namespace swiftspec::binding
