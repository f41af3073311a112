// Noise on the CPU.
#include "common/noise.h"

#include "bind/arguments.h"
#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

void noise_bits(uint64_t seed, uint32_t stream, uintptr_t positions, int64_t rows, int64_t vocab, uintptr_t out) {
  const NoiseArgs args(positions, rows, vocab, out);
  py::gil_scoped_release unlocked;
  host::noise_bits(seed, stream, args.positions, rows, vocab, args.out);
}

void gumbel_rows(uint64_t seed, uint32_t stream, uintptr_t positions, int64_t rows, uint32_t first, int64_t count,
                 uintptr_t out) {
  const NoiseArgs args(positions, rows, count, out);
  py::gil_scoped_release unlocked;
  auto* noise = reinterpret_cast<float*>(args.out);
  host::gumbel_rows(seed, stream, args.positions, rows, first, count, noise);
}

void gumbel_of(uintptr_t bits, int64_t count, uintptr_t out) {
  size_arg("count", count, 0);
  host::gumbel(pointer_arg<const uint32_t>("bits", bits, count), count, pointer_arg<float>("out", out, count));
}

void gumbel_keyed(uintptr_t keys, int64_t rows, uint32_t first, int64_t count, uintptr_t out) {
  size_arg("rows", rows, 0);
  size_arg("count", count, 1);
  const auto* of = pointer_arg<const uint32_t>("keys", keys, rows);
  auto* noise = pointer_arg<float>("out", out, rows);
  py::gil_scoped_release unlocked;
  host::gumbel_keyed(of, rows, first, count, noise);
}

}  // namespace

void bind_noise(py::module_& m) {
  m.def("noise_bits", &noise_bits, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("rows"),
        py::arg("vocab"), py::arg("out"),
        "Fill out[rows, vocab] (uint32, host) with the noise of the rows at positions[rows] (int32, host).");
  m.def("gumbel", &noise::gumbel, py::arg("bits"), "The float32 Gumbel draw of 32 noise bits.");
  m.def("gumbel64", &noise::gumbel64, py::arg("bits"), "The float64 Gumbel draw of 32 noise bits.");
  m.def("gumbel_of", &gumbel_of, py::arg("bits"), py::arg("count"), py::arg("out"),
        "The Gumbel noise (float32) of bits[count] (uint32), as gumbel_rows computes it.");
  m.def("gumbel_rows", &gumbel_rows, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("rows"),
        py::arg("first"), py::arg("count"), py::arg("out"),
        "noise_bits of `count` tokens from `first` on, as Gumbel noise (float32).");
  m.def("gumbel_keyed", &gumbel_keyed, py::arg("keys"), py::arg("rows"), py::arg("first"), py::arg("count"),
        py::arg("out"), "gumbel_rows of rows with these keys (uint32).");
}

}  // namespace swiftspec::binding
