// What a Python call hands over, checked: sizes in range, addresses that may be read as a type.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>

namespace py = pybind11;

namespace swiftspec::binding {

inline constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

inline void check(bool ok, const char* message) {
  if (!ok) throw py::value_error(message);
}

inline void check_inside(const int64_t* values, int64_t count, int64_t bound, const char* message) {
  for (int64_t i = 0; i < count; ++i) check(values[i] >= 0 && values[i] < bound, message);
}

inline int64_t size_arg(const char* name, int64_t value, int64_t least) {
  if (value < least || value > kMaxSize) {
    throw py::value_error(std::string(name) + " must be between " + std::to_string(least) + " and " +
                          std::to_string(kMaxSize) + ", not " + std::to_string(value));
  }
  return value;
}

template <typename T>
T* pointer_arg(const char* name, uintptr_t address, int64_t elements) {
  if (elements > 0 && address == 0) throw py::value_error(std::string(name) + " is null");
  if (address % alignof(T) != 0) throw py::value_error(std::string(name) + " is not aligned");
  return reinterpret_cast<T*>(address);
}

// An address of float32 elements, or of bfloat16 ones.
inline void* type_arg(const char* name, uintptr_t address, bool wide, int64_t elements) {
  return wide ? static_cast<void*>(pointer_arg<float>(name, address, elements))
              : static_cast<void*>(pointer_arg<uint16_t>(name, address, elements));
}

// The noise of rows: of the host or, as the addresses, of a GPU.
struct NoiseArgs {
  const int32_t* positions;
  uint32_t* out;

  NoiseArgs(uintptr_t positions_ptr, int64_t rows, int64_t vocab, uintptr_t out_ptr) {
    size_arg("rows", rows, 0);
    size_arg("vocab", vocab, 1);
    positions = pointer_arg<const int32_t>("positions", positions_ptr, rows);
    out = pointer_arg<uint32_t>("out", out_ptr, rows);
  }
};

}  // namespace swiftspec::binding
