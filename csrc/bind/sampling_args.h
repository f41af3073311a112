// Filters and penalties of a request, as mappings from names of SamplingParams (swiftspec/params.py) to values.
#pragma once

#include <pybind11/pybind11.h>

#include "bind/arguments.h"
#include "host/decoder/penalties.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace py = pybind11;

// A name that native code does not have is an error: otherwise its filter or penalty would not be applied.
inline host::FilterArgs filter_args(const py::dict& of) {
  check(of.size() == 3, "expected the filters top_k, top_p and min_p");
  const host::FilterArgs args{of["top_k"].cast<int64_t>(), of["top_p"].cast<float>(), of["min_p"].cast<float>()};
  check(args.top_k >= 0 && args.top_p > 0 && args.top_p <= 1 && args.min_p >= 0 && args.min_p <= 1,
        "a filter is out of range");
  return args;
}

inline host::PenaltyArgs penalty_args(const py::dict& of) {
  check(of.size() == 3, "expected repetition_penalty, presence_penalty and frequency_penalty");
  const host::PenaltyArgs args{of["repetition_penalty"].cast<float>(), of["presence_penalty"].cast<float>(),
                               of["frequency_penalty"].cast<float>()};
  check(args.repetition > 0, "the repetition penalty must be above 0");
  return args;
}

}  // namespace swiftspec::binding
