// Noise on a GPU, and from logits to tokens.
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

void children(uintptr_t logits, uintptr_t bias, uintptr_t noise, uintptr_t rows_of_noise, float temperature, float tau,
              int64_t rows, int64_t vocab, int64_t stride, int64_t k, uintptr_t tokens, uintptr_t values,
              uintptr_t stream) {
  check(temperature > 0 && tau > 0, "temperature and tau must be above 0");
  check(rows >= 1 && rows < 65536 && vocab >= 1 && vocab <= stride && int32_sized(stride),
        "between 1 and 65535 rows of at least `vocab` columns");
  check(k >= 1 && k <= 64 && k <= vocab, "k must lie in 1..64 and within the vocabulary");
  check(values != 0 || k == 1, "a draw is of one token");
  const ScoreArgs args{device_arg<const float>("logits", logits),
                       device_arg<const float>("bias", bias, true),
                       device_arg<const float>("noise", noise, true),
                       device_arg<const int64_t>("rows_of_noise", rows_of_noise, noise == 0),
                       temperature,
                       tau,
                       rows,
                       vocab,
                       stride};
  cuda::children(args, k, device_arg<int64_t>("tokens", tokens), device_arg<float>("values", values, true),
                 stream_arg(stream));
}

}  // namespace

void bind_cuda_sampling(py::module_& m) {
  m.def("noise_bits_cuda", &noise_bits, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("rows"),
        py::arg("vocab"), py::arg("out"), py::arg("cuda_stream") = 0,
        "noise_bits on device memory, on a CUDA stream (0: the default stream) of the current device.");
  m.def("gumbel_rows_cuda", &gumbel_rows, py::arg("seed"), py::arg("noise_stream"), py::arg("positions"),
        py::arg("rows"), py::arg("first"), py::arg("count"), py::arg("out"), py::arg("stream"));
  m.def("children_cuda", &children, py::arg("logits"), py::arg("bias"), py::arg("noise"), py::arg("rows_of_noise"),
        py::arg("temperature"), py::arg("tau"), py::arg("rows"), py::arg("vocab"), py::arg("stride"), py::arg("k"),
        py::arg("tokens"), py::arg("values"), py::arg("stream"), "Without values: the token drawn.");
}

}  // namespace swiftspec::binding
