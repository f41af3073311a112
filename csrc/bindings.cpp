// The only file that knows Python. Tensors arrive as addresses and sizes; what can be checked of them is checked here.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>

#include "kernels.h"
#include "noise.h"

namespace py = pybind11;

namespace {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

int64_t size_arg(const char* name, int64_t value, int64_t least) {
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

struct NoiseArgs {
  const int32_t* positions;
  uint32_t* out;

  NoiseArgs(uintptr_t positions_ptr, int64_t rows, int64_t vocab, uintptr_t out_ptr) {
    size_arg("rows", rows, 0);
    size_arg("vocab", vocab, 1);
    positions = pointer_arg<const int32_t>("positions", positions_ptr, rows);
    out = pointer_arg<uint32_t>("out", out_ptr, rows);
  }
};

void noise_bits(uint64_t seed, uint32_t stream, uintptr_t positions, int64_t rows, int64_t vocab,
                uintptr_t out) {
  const NoiseArgs args(positions, rows, vocab, out);
  py::gil_scoped_release unlocked;
  swiftspec::host::noise_bits(seed, stream, args.positions, rows, vocab, args.out);
}

#ifdef SWIFTSPEC_WITH_CUDA
void noise_bits_cuda(uint64_t seed, uint32_t stream, uintptr_t positions, int64_t rows, int64_t vocab,
                     uintptr_t out, uintptr_t cuda_stream) {
  const NoiseArgs args(positions, rows, vocab, out);
  swiftspec::cuda::noise_bits(seed, stream, args.positions, rows, vocab, args.out,
                              reinterpret_cast<swiftspec::Stream>(cuda_stream));
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "SwiftSpec's native kernels: addresses and sizes in, nothing out.";
  m.attr("build_info") = SWIFTSPEC_BUILD_INFO;
#ifdef SWIFTSPEC_WITH_CUDA
  m.attr("cuda_built") = true;
#else
  m.attr("cuda_built") = false;
#endif

  m.def("noise_bits", &noise_bits, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("rows"),
        py::arg("vocab"), py::arg("out"),
        "Fill out[rows, vocab] (uint32, host) with the noise of the rows at positions[rows] (int32, host).");
  m.def("gumbel", &swiftspec::noise::gumbel, py::arg("bits"), "The float32 Gumbel draw of 32 noise bits.");
  m.def("gumbel64", &swiftspec::noise::gumbel64, py::arg("bits"), "The float64 Gumbel draw of 32 noise bits.");
#ifdef SWIFTSPEC_WITH_CUDA
  m.def("noise_bits_cuda", &noise_bits_cuda, py::arg("seed"), py::arg("stream"), py::arg("positions"),
        py::arg("rows"), py::arg("vocab"), py::arg("out"), py::arg("cuda_stream") = 0,
        "noise_bits on device memory, on a CUDA stream (0: the default stream) of the current device.");
#endif
}
