// Checks of arguments other than arrays, and of signals during a wait.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>

#include "bind/array.h"

namespace swiftspec::binding {

inline constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
inline constexpr int64_t kBlock = 16;  // outputs of a block; host/ops/product.h has the layouts

inline void check(bool ok, const char* message) {
  if (!ok) throw py::value_error(message);
}

inline void check_range(const int64_t* values, int64_t count, int64_t bound, const char* message) {
  for (int64_t i = 0; i < count; ++i) check(values[i] >= 0 && values[i] < bound, message);
}

inline int64_t size_arg(const char* name, int64_t value, int64_t min) {
  if (value < min || value > kMaxSize) {
    throw py::value_error(std::string(name) + " must be between " + std::to_string(min) + " and " +
                          std::to_string(kMaxSize) + ", not " + std::to_string(value));
  }
  return value;
}

// Lets Ctrl-C interrupt a rank that waits for another process. Returns true if a Python exception is set.
inline bool interrupted() {
  const pybind11::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

}  // namespace swiftspec::binding
