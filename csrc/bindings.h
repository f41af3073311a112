// What the files that know Python share: arguments are checked, and an error is one line.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>

namespace py = pybind11;

namespace swiftspec::binding {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

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

inline void check(bool ok, const char* message) {
  if (!ok) throw py::value_error(message);
}

// Where CUDA is built, in the files of these names.
void bind_linear(py::module_& m);          // bindings_cuda.cpp
void bind_cuda_attention(py::module_& m);  // bindings_cuda_attention.cpp

}  // namespace swiftspec::binding
