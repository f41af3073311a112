// Embeddings on a GPU.
#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

void embed(uintptr_t tokens, uintptr_t table, int64_t rows, int64_t row_bytes, uintptr_t out, uintptr_t stream) {
  check(int32_sized(rows) && row_bytes >= 16 && row_bytes % 16 == 0, "rows must be multiples of 16 bytes");
  cuda::embed(device_arg<const int64_t>("tokens", tokens), aligned_arg("table", table), rows, row_bytes,
              aligned_arg("out", out), stream_arg(stream));
}

}  // namespace

void bind_cuda_embed(py::module_& m) {
  m.def("embed_cuda", &embed, py::arg("tokens"), py::arg("table"), py::arg("rows"), py::arg("row_bytes"),
        py::arg("out"), py::arg("stream"));
}

}  // namespace swiftspec::binding
