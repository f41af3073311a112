// Bindings of projections and the embedding lookup on a GPU.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bind/cuda_arguments.h"
#include "bind/module.h"
#include "cuda/linear/candidates.h"
#include "cuda/linear/prefill.h"
#include "cuda/linear/repack.h"
#include "cuda/linear/tiles.h"
#include "cuda/linear/tiling.h"
#include "cuda/peers/channel.h"

namespace swiftspec::binding {

namespace {

using cuda::Channel;
using cuda::LinearArgs;
using cuda::Weights;

constexpr uintptr_t kTileAlignment = 128;  // bytes

void check_shape(int64_t k, int64_t n, int64_t group) {
  size_arg("k", k, 8);
  size_arg("n", n, 1);
  check(k % 8 == 0, "k must be a multiple of 8");
  check(group == 0 || group == 32 || group == 64 || group == 128, "group must be 32, 64, 128, or 0 for bf16");
  check(group == 0 || (k % group == 0 && n % 8 == 0), "int4: group must divide k, and 8 must divide n");
}

// Sets the order of the outputs of a QKV projection; head_dim 0: another projection.
cuda::tiles::Tiling with_heads(const cuda::tiles::Tiling& tiling, int64_t head_dim) {
  if (head_dim == 0) return tiling;
  check(head_dim == 64 || head_dim == 128, "head_dim must be 64 or 128, or 0");
  check(tiling.n % head_dim == 0, "a part of a head");
  return cuda::tiles::with_heads(tiling, static_cast<int>(head_dim));
}

// The default tiling of a projection.
cuda::tiles::Tiling tiling_of(int64_t k, int64_t n, int64_t group,
                              const cuda::Device& device = cuda::device_info()) {
  check_shape(k, n, group);
  const auto tiling = cuda::tiles::tiling_for(k, n, static_cast<int>(group), device);
  if (tiling.n == 0) throw std::runtime_error("this GPU has too little shared memory for the CUDA operators");
  return tiling;
}

int64_t tile_bytes(int64_t k, int64_t n, int64_t group) {
  check_shape(k, n, group);
  return cuda::tiles::shape(k, n, static_cast<int>(group)).bytes();
}

using Row = std::tuple<std::string, int32_t, int32_t, int32_t, int32_t>;  // cuda::tiles::TilingRow with the name

const std::vector<std::string> kVariants = {"ring", "direct", "stream"};  // by cuda::tiles::Variant

Row named_row(const cuda::tiles::Tiling& tiling) {
  const auto [variant, cluster, warps, strips, blocks] = cuda::tiles::row_of(tiling);
  return {kVariants.at(variant), cluster, warps, strips, blocks};
}

std::vector<Row> candidates(int64_t k, int64_t n, int64_t group, int each) {
  check_shape(k, n, group);
  const auto found = cuda::tiles::candidates(k, n, static_cast<int>(group), cuda::device_info(), each);
  std::vector<Row> rows(found.size());
  std::transform(found.begin(), found.end(), rows.begin(), named_row);
  return rows;
}

// The tiling of this row; the default one if the device has no such row.
cuda::tiles::Tiling tiling_of(int64_t k, int64_t n, int64_t group, const cuda::Device& device,
                              const std::optional<Row>& row) {
  if (row) {
    check_shape(k, n, group);
    for (const auto& tiling : cuda::tiles::all_tilings(k, n, static_cast<int>(group), device)) {
      if (named_row(tiling) == *row) return tiling;
    }
  }
  return tiling_of(k, n, group, device);
}

// The current device, or a part of it.
cuda::Device device_of(const std::optional<int>& multiprocessors) {
  const cuda::Device& all = cuda::device_info();
  if (!multiprocessors) return all;
  check(*multiprocessors >= 1 && *multiprocessors <= all.max_clusters[0], "multiprocessors: 1 to those of the GPU");
  return cuda::part_of(all, *multiprocessors);
}

std::unique_ptr<Weights> make_weights(const Array& data, const MaybeArray& bias, int64_t k, int64_t n, int64_t group,
                                      const std::optional<Row>& row, const std::optional<int>& multiprocessors,
                                      int64_t head_dim) {
  const cuda::Device device = device_of(multiprocessors);
  const auto tiling = with_heads(tiling_of(k, n, group, device, row), head_dim);
  const Device here = gpu();
  const void* tiles = aligned("data", data.at<uint8_t>(here, "data", {tiling.bytes()}), kTileAlignment);
  const float* first = at_or_null<float>(bias, here, "bias", {n});
  cuda::prepare_linear(cuda::device_info());
  return std::make_unique<Weights>(Weights{device, tiling, tiles, first});
}

void precede(Weights& weights, const Array& tiles) {
  const auto* next = tiles.at<uint8_t>(gpu(), "tiles", {kAny});
  check(tiles.bytes() % kTileAlignment == 0 && reinterpret_cast<uintptr_t>(next) % kTileAlignment == 0,
        "tiles are lines of 128 bytes");
  weights.next = tiles.bytes() == 0 ? nullptr : next;
  weights.next_bytes = std::min(tiles.bytes(), cuda::tiles::prefetch_bytes(weights.device));
}

#ifdef SWIFTSPEC_STAMPS
void touch(Weights& weights, const Array& tiles) {
  weights.touched = tiles.at<uint8_t>(gpu(), "tiles", {kAny});
  weights.touched_bytes = tiles.bytes();
}
#endif

void repack_int4(const Array& codes, const Array& scales, const Array& zeros, int64_t group, const Array& out,
                 int64_t head_dim, uintptr_t stream) {
  const int64_t k = codes.size(0), n = scales.size(1);
  check(group != 0, "int4 weights have groups");
  const auto tiling = with_heads(tiling_of(k, n, group), head_dim);
  const Device here = gpu();
  const cuda::tiles::Int4Source source{codes.at<uint32_t>(here, "codes", {k, n / 8}),
                                       scales.at<float>(here, "scales", {k / group, n}),
                                       zeros.at<uint32_t>(here, "zeros", {k / group, n / 8})};
  void* to = aligned("out", out.at<uint8_t>(here, "out", {tiling.bytes()}), kTileAlignment);
  cuda::repack_int4(tiling, source, to, stream_arg(stream));
}

void repack_bf16(const Array& matrix, const Array& out, int64_t head_dim, uintptr_t stream) {
  const auto tiling = with_heads(tiling_of(matrix.size(1), matrix.size(0), 0), head_dim);
  const Device here = gpu();
  void* to = aligned("out", out.at<uint8_t>(here, "out", {tiling.bytes()}), kTileAlignment);
  cuda::repack_bf16(tiling, matrix.at<Bfloat16>(here, "matrix", {kAny, kAny}), to, stream_arg(stream));
}

void unpack_rows(const Weights& weights, int64_t first, const Array& out, uintptr_t stream) {
  const auto& tiling = weights.tiling;
  const int64_t half = out.size(0) / 2;
  check(tiling.n % 2 == 0 && first >= 0 && half >= 1, "an even number of outputs, some of them");
  check(16 * first + half <= tiling.half, "the weight has no such outputs");
  check(tiling.heads == 0 || (16 * first % tiling.apart == 0 && half % tiling.apart == 0), "parts of heads");
  cuda::unpack_rows(weights, first, half, bfloat16_arg("out", out, gpu(), {2 * half, tiling.k}), stream_arg(stream));
}

// Checks the arguments for all rows; a launch computes some of them.
LinearArgs linear_args(const Weights& weights, const Array& x, const MaybeArray& norm, float eps,
                       const MaybeArray& residual, const Array& out, bool swiglu, const Channel* channel) {
  const int64_t rows = x.size(0), k = weights.tiling.k, n = weights.tiling.n;
  const bool logits = out.type() == kFloat32;
  check(channel == nullptr || !norm, "sums over ranks have no norm");
  check(!swiglu || (n % 2 == 0 && !residual && !logits && channel == nullptr), "swiglu halves the outputs into out");
  check(!swiglu || weights.tiling.heads == 0, "swiglu needs gates half of the outputs before their factors");
  check(!logits || (channel == nullptr && !residual), "logits are not summed");
  const int64_t most = std::min<int64_t>(rows, cuda::tiles::kMaxRows);
  check(channel == nullptr || cuda::tiles::ll_lines(weights.tiling, most) <= channel->layout.lines,
        "the product is longer than the group's lines");
  const Device here = gpu();
  return {&weights,
          bfloat16_arg("x", x, here, {kAny, k}),
          norm ? bfloat16_arg("norm", *norm, here, {k}) : nullptr,
          eps,
          residual ? bfloat16_arg("residual", *residual, here, {rows, n}) : nullptr,
          logits ? nullptr : out.at<Bfloat16>(here, "out", {rows, swiglu ? n / 2 : n}),
          logits ? out.at<float>(here, "out", {rows, n}) : nullptr,
          swiglu,
          channel,
          rows};
}

int64_t scratch_bytes(const Weights& weights, int64_t rows, bool prefill) {
  const int64_t bytes = prefill ? cuda::prefill_scratch_bytes(weights, rows) : 0;
  return bytes > 0 ? bytes : cuda::large_m_scratch_bytes(weights, rows);
}

// With `prefill` runs one launch of the prefill kernel for all rows, if there is one; else large-M launches for as many
// rows as possible, and the remaining rows 32 at a time.
void linear(const Weights& weights, const Array& x, const MaybeArray& norm, float eps, const MaybeArray& residual,
            const Array& out, bool swiglu, std::optional<const Channel*> channel, const MaybeArray& scratch,
            bool prefill, uintptr_t stream) {
  const LinearArgs args = linear_args(weights, x, norm, eps, residual, out, swiglu, channel.value_or(nullptr));
  const int64_t bytes = scratch_bytes(weights, args.rows, prefill);
  void* slabs = scratch ? aligned("scratch", scratch->at<uint8_t>(gpu(), "scratch", {bytes}), kTileAlignment) : nullptr;
  const bool together = args.channel == nullptr && slabs != nullptr;
  const UnlockedLaunches unlocked(args.rows);
  if (together && prefill && cuda::prefill_scratch_bytes(weights, args.rows) > 0) {
    return cuda::linear_prefill(args, slabs, stream_arg(stream));
  }
  int64_t first = together ? cuda::linear_large_m(args, slabs, stream_arg(stream)) : 0;
  for (; first < args.rows; first += cuda::tiles::kMaxRows) {
    const int64_t rows = std::min<int64_t>(args.rows - first, cuda::tiles::kMaxRows);
    cuda::linear(cuda::slice_rows(args, first, rows), stream_arg(stream));
  }
}

void linear_virtual(const std::vector<const Weights*>& weights, const std::vector<Array>& x, const Array& residual,
                    const std::vector<Array>& out, const std::vector<const Channel*>& channels, uint32_t delays,
                    uintptr_t stream) {
  const size_t count = channels.size();
  check(count >= 1 && count <= cuda::kMaxPeers, "1 to 8 ranks");
  check(weights.size() == count && x.size() == count && out.size() == count, "one of each for every rank");
  std::vector<LinearArgs> args;
  for (size_t r = 0; r < count; ++r) {
    check(weights[r] != nullptr && channels[r] != nullptr, "a rank without weights or channel");
    const auto &mine = weights[r]->tiling, &first = weights[0]->tiling;
    check(mine.k == first.k && mine.n == first.n && mine.group == first.group, "ranks of different shapes");
    args.push_back(linear_args(*weights[r], x[r], {}, 0, residual, out[r], false, channels[r]));
    check(args[r].rows >= 1 && args[r].rows <= cuda::tiles::kMaxRows, "1 to 32 rows");
  }
  cuda::linear_virtual(args.data(), static_cast<int>(count), delays, stream_arg(stream));
}

void embed(const Array& tokens, const Array& table, const Array& out, uintptr_t stream) {
  const int64_t rows = tokens.size(0), width = table.size(1), row_bytes = width * (kBfloat16.bits / 8);
  check(int32_sized(rows) && row_bytes >= 16 && row_bytes % 16 == 0, "rows must be multiples of 16 bytes");
  const Device here = gpu();
  const void* from = bfloat16_arg("table", table, here, {kAny, kAny});
  cuda::embed(tokens.at<int64_t>(here, "tokens", {kAny}), from, rows, row_bytes,
              bfloat16_arg("out", out, here, {rows, width}), stream_arg(stream));
}

}  // namespace

void bind_cuda_linear(py::module_& m) {
  py::class_<Weights>(m, "CudaWeights",
                      "A projection's tiles on the current GPU, which it keeps alive; see cuda::Weights in "
                      "cuda/linear/tiling.h.")
      .def(py::init(&make_weights), py::arg("data"), py::arg("bias"), py::arg("k"), py::arg("n"), py::arg("group"),
           py::arg("row") = py::none(), py::arg("multiprocessors") = py::none(), py::arg("head_dim") = 0,
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           "group 0 is bf16. `row`: one of cuda_tilings; the default tiling without it, and if this GPU does not have it. "
           "`multiprocessors`: that its launches occupy at a time; all of the GPU's without it. `head_dim`: of a QKV "
           "projection whose tiles were repacked with it.")
      .def_property_readonly("row", [](const Weights& self) { return named_row(self.tiling); },
                             "The row of its tiling; see cuda_tilings.")
      .def_property_readonly(
          "multiprocessors", [](const Weights& self) { return self.device.max_clusters[0]; },
          "Multiprocessors that its launches occupy at a time.")
      .def("precede", &precede, py::arg("tiles"), py::keep_alive<1, 2>(),
           "Sets the tiles that this projection prefetches to L2 before it ends.")
#ifdef SWIFTSPEC_STAMPS
      .def("touch", &touch, py::arg("tiles"), py::keep_alive<1, 2>(),
           "Sets memory of which each block loads one byte per page at its start; see cuda/stamps.cuh.")
#endif
      .def_property_readonly(
          "has_prefill_kernel", [](const Weights& self) { return cuda::tiles::has_prefill_kernel(self.device); },
          "Whether products of many rows need no unpacked weights; see cuda::linear_prefill in kernels_cuda.h.")
      .def("scratch_bytes", &scratch_bytes, py::arg("rows"), py::arg("prefill"),
           "Scratch bytes of a product of `rows` rows that reads the weights once for many of them; 0 if it cannot.");
  m.def("cuda_tile_bytes", &tile_bytes, py::arg("k"), py::arg("n"), py::arg("group"),
        "Bytes of a projection's tiles, the same for every tiling. group 0 is bf16.");
  m.def("cuda_tilings", &candidates, py::arg("k"), py::arg("n"), py::arg("group"), py::arg("each"),
        "Tilings of a projection on the current GPU: the default, then up to `each` others of each variant, by estimated "
        "time. A row: variant, CTAs of a cluster, warps of a strip, strips of a block, blocks per multiprocessor.");
  m.def(
      "cuda_lines",
      [](int64_t n, int64_t rows) {
        check_shape(8, n, 0);
        return cuda::tiles::ll_lines(cuda::tiles::shape(8, n, 0), rows);
      },
      py::arg("n"), py::arg("rows"), "LL lines of a product with n outputs; they do not depend on its inputs.");
  m.def("repack_int4_cuda", &repack_int4, py::arg("codes"), py::arg("scales"), py::arg("zeros"), py::arg("group"),
        py::arg("out"), py::arg("head_dim"), py::arg("stream"),
        "Repacks an int4 matrix into tiles; see cuda/linear/repack.h. `head_dim`: of a QKV projection, else 0.");
  m.def("repack_bf16_cuda", &repack_bf16, py::arg("matrix"), py::arg("out"), py::arg("head_dim"), py::arg("stream"),
        "Repacks a bfloat16 matrix [n, k] into tiles.");
  m.def("expand_cuda", &unpack_rows, py::arg("weights"), py::arg("first"), py::arg("out"), py::arg("stream"),
        "Unpacks tiles to rows [2 half, k] of bfloat16; see cuda::unpack_rows in kernels_cuda.h.");
  m.def("linear_cuda", &linear, py::arg("weights"), py::arg("x"), py::arg("norm"), py::arg("eps"), py::arg("residual"),
        py::arg("out"), py::arg("swiglu"), py::arg("channel"), py::arg("scratch"), py::arg("prefill"), py::arg("stream"),
        "A projection; see cuda::LinearArgs in kernels_cuda.h. A float32 `out` receives logits. With scratch_bytes of "
        "`scratch` a launch takes many rows, else 32. `prefill`: the bits of a row may depend on the number of rows.");
  m.def("linear_cuda_virtual", &linear_virtual, py::arg("weights"), py::arg("x"), py::arg("residual"), py::arg("out"),
        py::arg("channels"), py::arg("delays"), py::arg("stream"),
        "All ranks of a group in one launch, for tests; see linear_virtual in kernels_cuda.h.");
  m.def("embed_cuda", &embed, py::arg("tokens"), py::arg("table"), py::arg("out"), py::arg("stream"),
        "out[row] = table[tokens[row]].");
}

}  // namespace swiftspec::binding
