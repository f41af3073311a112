// How a wait for another process ends, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace swiftspec::binding {

// Whether the user wants out: Ctrl-C reaches a rank that waits. True: a Python exception is set.
inline bool interrupted() {
  const pybind11::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

}  // namespace swiftspec::binding
