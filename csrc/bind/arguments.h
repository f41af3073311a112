// What a Python call hands over besides arrays, checked.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>

#include "bind/array.h"

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

}  // namespace swiftspec::binding
