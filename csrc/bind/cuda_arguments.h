// Checks and conversions of the arguments of CUDA operators.
#pragma once

#include <cstdint>
#include <optional>
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

// Releases the GIL for launches of many rows, as of prefill chunks: they wait while the driver's queue is full, which it
// stays if another rank is late, and other threads must send heartbeats meanwhile. Launches of few rows keep it, since
// taking it back can cost milliseconds.
class UnlockedLaunches {
 public:
  explicit UnlockedLaunches(int64_t rows) {
    if (rows > kFewRows) unlocked_.emplace();
  }

 private:
  static constexpr int64_t kFewRows = 32;  // of one launch of a projection (cuda/linear/tiling.h)

  std::optional<py::gil_scoped_release> unlocked_;
};

inline bool int32_sized(int64_t value) { return value >= 0 && value <= kMaxSize; }

}  // namespace swiftspec::binding
