// A norm on a GPU that stands alone.
#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

void rms_norm(uintptr_t x, uintptr_t weight, float eps, int64_t rows, int64_t dim, uintptr_t out, uintptr_t stream) {
  check(int32_sized(rows) && dim >= 8 && dim % 8 == 0, "dim must be a multiple of 8");
  cuda::rms_norm(aligned_arg("x", x), aligned_arg("weight", weight), eps, rows, dim, aligned_arg("out", out),
                 stream_arg(stream));
}

}  // namespace

void bind_cuda_norm(py::module_& m) {
  m.def("rms_norm_cuda", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("rows"), py::arg("dim"),
        py::arg("out"), py::arg("stream"));
}

}  // namespace swiftspec::binding
