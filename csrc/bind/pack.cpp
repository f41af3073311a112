// Weights at load, and the sums by which a file of packed ones is checked.
#include "host/pack/pack.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bind/arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

using host::Codes;

constexpr int64_t kBlock = 16, kEight = 8;

Codes order_of(const std::string& name) {
  check(name == "outputs" || name == "awq" || name == "inputs", "order is outputs, awq or inputs");
  return name == "inputs" ? Codes::inputs : name == "awq" ? Codes::awq : Codes::outputs;
}

// Two dimensions of elements that may lie however they like, of which `group` counts the groups.
host::Grouped grouped(const Array& array, Type type, const char* name, int64_t groups, int64_t others, bool turned) {
  if (turned) {
    const void* data = array.strided_at(type, kCpu, name, {others, groups});
    return {data, array.stride(1), array.stride(0)};
  }
  const void* data = array.strided_at(type, kCpu, name, {groups, others});
  return {data, array.stride(0), array.stride(1)};
}

void pack_int4(const Array& codes, const Array& scales, const MaybeArray& zeros, const std::string& order,
               int64_t first, const Array& data, const Array& block_scales, const Array& block_zeros) {
  const Codes kind = order_of(order);
  const bool turned = kind == Codes::inputs;
  const int64_t n = codes.size(turned ? 0 : 1) * (turned ? 1 : kEight), k = codes.size(turned ? 1 : 0) * (turned ? kEight : 1);
  const int64_t groups = scales.size(turned ? 1 : 0), blocks = data.size(0);
  check(n % kEight == 0 && first >= 0 && first % kEight == 0, "outputs come in eights");
  check(groups > 0 && k % groups == 0 && k / groups % kEight == 0, "a group must be a multiple of 8 that divides k");
  check(first + n <= blocks * kBlock, "there are more outputs than blocks for them");
  const Type type = scales.type() == kFloat32 || scales.type() == kFloat16 ? scales.type() : kBfloat16;
  host::Int4Part part{kind, static_cast<const uint32_t*>(codes.rows_at(kInt32, kCpu, "codes", {kAny, kAny})),
                      codes.stride(0), grouped(scales, type, "scales", groups, n, turned), {}, k, n, k / groups};
  if (zeros) part.zeros = grouped(*zeros, kInt32, "zeros", groups, n / kEight, turned);
  auto* words = data.at<uint32_t>(kCpu, "data", {blocks, k / kEight, kBlock});
  void* to_scales = block_scales.at(type, kCpu, "block_scales", {blocks, groups, kBlock});
  auto* to_zeros = block_zeros.at<uint8_t>(kCpu, "block_zeros", {blocks, groups, kBlock});
  py::gil_scoped_release unlocked;
  host::pack_int4(part, first, type.bits / 8, words, to_scales, to_zeros);
}

void pack_dense(const Array& matrix, const Array& data) {
  const int64_t n = matrix.size(0), k = matrix.size(1), blocks = (n + kBlock - 1) / kBlock;
  const bool wide = matrix.type() == kFloat32;
  check(k % kEight == 0, "the inputs must be a multiple of 8");
  const int64_t words = wide ? k : k / 2;
  const void* rows = matrix.rows_at(model_type(wide), kCpu, "matrix", {kAny, kAny});
  void* out = wide ? static_cast<void*>(data.at<float>(kCpu, "data", {blocks, k, kBlock}))
                   : data.at<Bfloat16>(kCpu, "data", {blocks, words, kBlock, 2});
  check(wide || n == 1 || matrix.stride(0) % 2 == 0, "rows must begin at whole words");
  const int64_t stride = wide ? matrix.stride(0) : matrix.stride(0) / 2;
  py::gil_scoped_release unlocked;
  host::pack_rows(static_cast<const uint32_t*>(rows), n, words, stride, static_cast<uint32_t*>(out));
}

void pack_rounded(const Array& matrix, const Array& data, const Array& scales) {
  const int64_t n = matrix.size(0), k = matrix.size(1), blocks = (n + kBlock - 1) / kBlock, groups = scales.size(1);
  const bool wide = matrix.type() == kFloat32;
  check(groups > 0 && k % groups == 0 && k / groups % kEight == 0 && k / groups <= 128,
        "a group must be a multiple of 8, at most 128, that divides k");
  const void* rows = matrix.rows_at(model_type(wide), kCpu, "matrix", {kAny, kAny});
  auto* words = data.at<uint32_t>(kCpu, "data", {blocks, k / 4, kBlock});
  auto* to_scales = scales.at<Bfloat16>(kCpu, "scales", {blocks, groups, kBlock});
  py::gil_scoped_release unlocked;
  host::pack_rounded(rows, wide, n, k, matrix.stride(0), k / groups, words, to_scales);
}

py::bytes sums_of(const Array& data) {
  const int64_t bytes = data.count(), pieces = (bytes + host::kSumPiece - 1) / host::kSumPiece;
  const auto* from = data.at<uint8_t>(kCpu, "data", {kAny});
  std::vector<uint64_t> sums(static_cast<size_t>(pieces));
  {
    py::gil_scoped_release unlocked;
    host::sums_of(from, bytes, sums.data());
  }
  return {reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(uint64_t)};
}

}  // namespace

void bind_pack(py::module_& m) {
  m.def("pack_int4", &pack_int4, py::arg("codes"), py::arg("scales"), py::arg("zeros"), py::arg("order"),
        py::arg("first"), py::arg("data"), py::arg("block_scales"), py::arg("block_zeros"),
        "Fill the blocks of n outputs from `first` on. `order` outputs or awq: codes [k, n / 8] int32, scales "
        "[k / group, n], zeros [k / group, n / 8]; inputs: codes [n, k / 8], scales [n, k / group], zeros "
        "[n / 8, k / group]. Without zeros they are 8.");
  m.def("pack_dense", &pack_dense, py::arg("matrix"), py::arg("data"),
        "Lay a bfloat16 or float32 matrix [n, k] out in blocks of 16 outputs, filled up with zeros.");
  m.def("pack_rounded", &pack_rounded, py::arg("matrix"), py::arg("data"), py::arg("scales"),
        "Round a bfloat16 or float32 matrix [n, k] to int8 and lay it out in blocks of 16 outputs.");
  m.def("sums_of", &sums_of, py::arg("data"),
        "For each whole or begun megabyte of bytes [n] eight bytes that any changed bit changes, too.");
}

}  // namespace swiftspec::binding
