// Noise on a GPU.
#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

void noise_bits(uint64_t seed, uint32_t noise_stream, uintptr_t positions, int64_t rows, int64_t vocab, uintptr_t out,
                uintptr_t stream) {
  const NoiseArgs args(positions, rows, vocab, out);
  cuda::noise_bits(seed, noise_stream, args.positions, rows, vocab, args.out, stream_arg(stream));
}

void gumbel_rows(uint64_t seed, uint32_t noise_stream, uintptr_t positions, int64_t rows, uint32_t first, int64_t count,
                 uintptr_t out, uintptr_t stream) {
  check(rows >= 1 && rows < 65536 && int32_sized(count), "between 1 and 65535 rows");
  cuda::gumbel_rows(seed, noise_stream, device_arg<const int64_t>("positions", positions), rows, first, count,
                    device_arg<float>("out", out), stream_arg(stream));
}

}  // namespace

void bind_cuda_noise(py::module_& m) {
  m.def("noise_bits_cuda", &noise_bits, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("rows"),
        py::arg("vocab"), py::arg("out"), py::arg("cuda_stream") = 0,
        "noise_bits on device memory, on a CUDA stream (0: the default stream) of the current device.");
  m.def("gumbel_rows_cuda", &gumbel_rows, py::arg("seed"), py::arg("noise_stream"), py::arg("positions"),
        py::arg("rows"), py::arg("first"), py::arg("count"), py::arg("out"), py::arg("stream"));
}

}  // namespace swiftspec::binding
