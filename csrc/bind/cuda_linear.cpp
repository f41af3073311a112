// Projections on a GPU, and what stands beside them: embeddings, and a norm of its own.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bind/cuda_arguments.h"
#include "bind/module.h"
#include "cuda/linear/repack.h"
#include "cuda/linear/tiles.h"
#include "cuda/linear/tiling.h"
#include "cuda/peers/channel.h"

namespace swiftspec::binding {

namespace {

using cuda::Channel;
using cuda::LinearArgs;
using cuda::Weights;

const void* aligned_or_null(const char* name, uintptr_t address) {
  if (address % 16 != 0) throw py::value_error(std::string(name) + " is not aligned to 16 bytes");
  return reinterpret_cast<const void*>(address);
}

cuda::tiles::Tiling tiling_of(int64_t k, int64_t n, int64_t group) {
  size_arg("k", k, 8);
  size_arg("n", n, 1);
  check(k % 8 == 0, "k must be a multiple of 8");
  check(group == 0 || group == 32 || group == 64 || group == 128, "group must be 32, 64, 128, or 0 for bf16");
  check(group == 0 || (k % group == 0 && n % 8 == 0), "int4: group must divide k, and 8 must divide n");
  return cuda::tiles::tiling_for(k, n, static_cast<int>(group));
}

std::unique_ptr<Weights> make_weights(uintptr_t data, uintptr_t bias, int64_t k, int64_t n, int64_t group) {
  const auto tiling = tiling_of(k, n, group);
  check(data != 0 && data % 128 == 0, "data is null, or not aligned to 128 bytes");
  const auto* first = pointer_arg<const float>("bias", bias, 0);
  return std::make_unique<Weights>(Weights{tiling, reinterpret_cast<const void*>(data), first, cuda::prepare(tiling)});
}

void precede(Weights& weights, uintptr_t tiles, int64_t bytes) {
  check(tiles != 0 && tiles % 128 == 0 && bytes >= 0 && bytes % 128 == 0, "tiles are null, or not lines of 128 bytes");
  weights.next = reinterpret_cast<const uint8_t*>(tiles);
  weights.next_bytes = std::min(bytes, cuda::tiles::kAheadBytes);
}

void repack_int4(int64_t k, int64_t n, int64_t group, uintptr_t codes, uintptr_t scales, uintptr_t zeros, uintptr_t out,
                 uintptr_t stream) {
  check(group != 0, "int4 weights have groups");
  const auto tiling = tiling_of(k, n, group);
  const cuda::tiles::Int4Source source{pointer_arg<const uint32_t>("codes", codes, 1),
                                       pointer_arg<const float>("scales", scales, 1),
                                       pointer_arg<const uint32_t>("zeros", zeros, 1)};
  cuda::repack_int4(tiling, source, pointer_arg<uint32_t>("out", out, 1), stream_arg(stream));
}

void repack_bf16(int64_t k, int64_t n, uintptr_t matrix, uintptr_t out, uintptr_t stream) {
  const auto* from = pointer_arg<const uint16_t>("matrix", matrix, 1);
  cuda::repack_bf16(tiling_of(k, n, 0), from, pointer_arg<uint32_t>("out", out, 1), stream_arg(stream));
}

LinearArgs linear_args(const Weights& weights, uintptr_t x, uintptr_t norm, float eps, uintptr_t residual,
                       uintptr_t out, uintptr_t logits, bool swiglu, const Channel* channel, int64_t rows) {
  check(rows >= 0 && rows <= cuda::tiles::kMaxRows, "0 to 32 rows at a time");
  check((out == 0) != (logits == 0), "give one of out and logits");
  check(!swiglu || (weights.tiling.n % 2 == 0 && residual == 0 && logits == 0 && channel == nullptr),
        "swiglu halves the outputs into out");
  check(channel == nullptr || logits == 0, "logits are not summed over ranks");
  check(channel == nullptr || cuda::tiles::ll_lines(weights.tiling, rows) <= channel->layout.lines,
        "the product is longer than the group's lines");
  check(rows == 0 || x != 0, "x is null");
  return {&weights,
          aligned_or_null("x", x),
          aligned_or_null("norm", norm),
          eps,
          pointer_arg<const uint16_t>("residual", residual, 0),
          pointer_arg<uint16_t>("out", out, 0),
          pointer_arg<float>("logits", logits, 0),
          swiglu,
          channel,
          rows};
}

void linear(const Weights& weights, uintptr_t x, uintptr_t norm, float eps, uintptr_t residual, uintptr_t out,
            uintptr_t logits, bool swiglu, const Channel* channel, int64_t rows, uintptr_t stream) {
  cuda::linear(linear_args(weights, x, norm, eps, residual, out, logits, swiglu, channel, rows), stream_arg(stream));
}

void linear_virtual(const std::vector<const Weights*>& weights, const std::vector<uintptr_t>& x, uintptr_t residual,
                    const std::vector<uintptr_t>& out, const std::vector<const Channel*>& channels, int64_t rows,
                    uint32_t delays, uintptr_t stream) {
  const size_t count = channels.size();
  check(count >= 1 && count <= cuda::kMaxPeers, "1 to 8 ranks");
  check(weights.size() == count && x.size() == count && out.size() == count && rows >= 1, "one of each for every rank");
  std::vector<LinearArgs> args;
  for (size_t r = 0; r < count; ++r) {
    check(weights[r] != nullptr && channels[r] != nullptr, "a rank without weights or channel");
    const auto &mine = weights[r]->tiling, &first = weights[0]->tiling;
    check(mine.k == first.k && mine.n == first.n && mine.group == first.group, "ranks of different shapes");
    args.push_back(linear_args(*weights[r], x[r], 0, 0, residual, out[r], 0, false, channels[r], rows));
  }
  cuda::linear_virtual(args.data(), static_cast<int>(count), delays, stream_arg(stream));
}

void embed(uintptr_t tokens, uintptr_t table, int64_t rows, int64_t row_bytes, uintptr_t out, uintptr_t stream) {
  check(int32_sized(rows) && row_bytes >= 16 && row_bytes % 16 == 0, "rows must be multiples of 16 bytes");
  cuda::embed(device_arg<const int64_t>("tokens", tokens), aligned_arg("table", table), rows, row_bytes,
              aligned_arg("out", out), stream_arg(stream));
}

void rms_norm(uintptr_t x, uintptr_t weight, float eps, int64_t rows, int64_t dim, uintptr_t out, uintptr_t stream) {
  check(int32_sized(rows) && dim >= 8 && dim % 8 == 0, "dim must be a multiple of 8");
  cuda::rms_norm(aligned_arg("x", x), aligned_arg("weight", weight), eps, rows, dim, aligned_arg("out", out),
                 stream_arg(stream));
}

}  // namespace

void bind_cuda_linear(py::module_& m) {
  py::class_<Weights>(m, "CudaWeights",
                      "A projection's tiles on the current device; see cuda::Weights in cuda/linear/tiling.h.")
      .def(py::init(&make_weights), py::arg("data"), py::arg("bias"), py::arg("k"), py::arg("n"), py::arg("group"))
      .def("precede", &precede, py::arg("tiles"), py::arg("bytes"),
           "The tiles that L2 is to have when this projection ends, for as long as both are used.");
  m.def(
      "cuda_tile_bytes", [](int64_t k, int64_t n, int64_t group) { return tiling_of(k, n, group).bytes(); },
      py::arg("k"), py::arg("n"), py::arg("group"), "Bytes of a projection's tiles. group 0 is bf16.");
  m.def(
      "cuda_lines", [](int64_t n, int64_t rows) { return cuda::tiles::ll_lines(tiling_of(8, n, 0), rows); },
      py::arg("n"), py::arg("rows"), "LL lines of a product of n outputs, whatever its inputs.");
  m.def("repack_int4_cuda", &repack_int4, py::arg("k"), py::arg("n"), py::arg("group"), py::arg("codes"),
        py::arg("scales"), py::arg("zeros"), py::arg("out"), py::arg("stream"), "See repack_int4 in kernels_cuda.h.");
  m.def("repack_bf16_cuda", &repack_bf16, py::arg("k"), py::arg("n"), py::arg("matrix"), py::arg("out"),
        py::arg("stream"), "See repack_bf16 in kernels_cuda.h.");
  m.def("linear_cuda", &linear, py::arg("weights"), py::arg("x"), py::arg("norm"), py::arg("eps"), py::arg("residual"),
        py::arg("out"), py::arg("logits"), py::arg("swiglu"), py::arg("channel").none(true), py::arg("rows"),
        py::arg("stream"), "A projection of up to 32 rows; see cuda::LinearArgs in kernels_cuda.h. 0 is null.");
  m.def("linear_cuda_virtual", &linear_virtual, py::arg("weights"), py::arg("x"), py::arg("residual"), py::arg("out"),
        py::arg("channels"), py::arg("rows"), py::arg("delays"), py::arg("stream"),
        "All ranks of a group in one launch, for tests; see linear_virtual in kernels_cuda.h.");
  m.def("embed_cuda", &embed, py::arg("tokens"), py::arg("table"), py::arg("rows"), py::arg("row_bytes"),
        py::arg("out"), py::arg("stream"));
  m.def("rms_norm_cuda", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("rows"), py::arg("dim"),
        py::arg("out"), py::arg("stream"));
}

}  // namespace swiftspec::binding
