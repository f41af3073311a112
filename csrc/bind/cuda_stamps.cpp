// Bindings of the stamps of builds with SWIFTSPEC_STAMPS.
#ifdef SWIFTSPEC_STAMPS

#include "cuda/stamps.h"

#include <pybind11/stl.h>

#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

using cuda::stamps::kRecordWords;
using cuda::stamps::Recorder;

void start(const Array& buffer) {
  const int64_t records = buffer.size(0);
  auto* words = buffer.at<int64_t>(gpu(), "buffer", {records, kRecordWords});
  Recorder::get().start(reinterpret_cast<uint64_t*>(words), records);
}

py::list stop() {
  py::list found;
  for (const auto& entry : Recorder::get().stop()) found.append(py::make_tuple(entry.kernel, entry.first, entry.warps));
  return found;
}

}  // namespace

void bind_cuda_stamps(py::module_& m) {
  m.attr("STAMP_WORDS") = kRecordWords;
  m.def("start_stamps", &start, py::arg("buffer"),
        "Launches from here on write stamps to `buffer` [records, STAMP_WORDS] int64, which the caller keeps alive.");
  m.def("stop_stamps", &stop, "Ends this. Returns (kernel, first record, records) of each launch.");
}

}  // namespace swiftspec::binding

#endif
