// What a Python call hands over to a GPU. Addresses are the device's, so of arrays only sizes and alignment are
// checked.
#pragma once

#include <cstdint>
#include <string>

#include "bind/arguments.h"
#include "kernels_cuda.h"

namespace swiftspec::binding {

// An address that may be null where it is `optional`.
template <class T>
T* device_arg(const char* name, uintptr_t address, bool optional = false) {
  return pointer_arg<T>(name, address, optional ? 0 : 1);
}

// An address whose memory is read 16 bytes at a time.
inline void* aligned_arg(const char* name, uintptr_t address) {
  if (address == 0 || address % 16 != 0) throw py::value_error(std::string(name) + " must be aligned to 16 bytes");
  return reinterpret_cast<void*>(address);
}

inline cuda::Stream stream_arg(uintptr_t address) { return reinterpret_cast<cuda::Stream>(address); }

inline bool int32_sized(int64_t value) { return value >= 0 && value <= kMaxSize; }

}  // namespace swiftspec::binding
