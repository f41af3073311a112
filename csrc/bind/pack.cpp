// Packing of weights at load, and checksums of packed weights.
#include "host/pack/pack.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bind/arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

using host::CodeOrder;

constexpr int64_t kEight = 8;

CodeOrder order_of(const std::string& name) {
  if (name == "gptq") return CodeOrder::gptq;
  check(name == "outputs" || name == "awq" || name == "inputs", "order must be outputs, awq, inputs or gptq");
  return name == "inputs" ? CodeOrder::inputs : name == "awq" ? CodeOrder::awq : CodeOrder::outputs;
}

// A strided view of [groups, others], or of [others, groups] if transposed.
host::GroupedView grouped(const Array& array, Type type, const char* name, int64_t groups, int64_t others,
                          bool transposed) {
  if (transposed) {
    const void* data = array.strided_at(type, kCpu, name, {others, groups});
    return {data, array.stride(1), array.stride(0)};
  }
  const void* data = array.strided_at(type, kCpu, name, {groups, others});
  return {data, array.stride(0), array.stride(1)};
}

void pack_int4(const Array& codes, const Array& scales, const MaybeArray& zeros, const std::string& order,
               int64_t first, const Array& data, const Array& block_scales, const Array& block_zeros) {
  const CodeOrder kind = order_of(order);
  const bool transposed = kind == CodeOrder::inputs, by_inputs = transposed || kind == CodeOrder::gptq;
  const int64_t n = codes.size(transposed ? 0 : 1) * (by_inputs ? 1 : kEight);
  const int64_t k = codes.size(transposed ? 1 : 0) * (by_inputs ? kEight : 1);
  const int64_t groups = scales.size(transposed ? 1 : 0), blocks = data.size(0);
  check(n % kEight == 0 && first >= 0 && first % kEight == 0, "outputs must be a multiple of 8");
  check(groups > 0 && k % groups == 0 && k / groups % kEight == 0, "a group must be a multiple of 8 that divides k");
  check(first + n <= blocks * kBlock, "the outputs do not fit the blocks");
  const Type type = scales.type() == kFloat32 || scales.type() == kFloat16 ? scales.type() : kBfloat16;
  host::Int4Part part{kind, static_cast<const uint32_t*>(codes.rows_at(kInt32, kCpu, "codes", {kAny, kAny})),
                      codes.stride(0), grouped(scales, type, "scales", groups, n, transposed), {}, k, n, k / groups};
  if (zeros) part.zeros = grouped(*zeros, kInt32, "zeros", groups, n / kEight, transposed);
  auto* words = data.at<uint32_t>(kCpu, "data", {blocks, k / kEight, kBlock});
  void* to_scales = block_scales.at(type, kCpu, "block_scales", {blocks, groups, kBlock});
  auto* to_zeros = block_zeros.at<uint8_t>(kCpu, "block_zeros", {blocks, groups, kBlock});
  py::gil_scoped_release unlocked;
  host::pack_int4(part, first, type.bits / 8, words, to_scales, to_zeros);
}

void pack_dense(const Array& matrix, const Array& data) {
  const int64_t n = matrix.size(0), k = matrix.size(1), blocks = (n + kBlock - 1) / kBlock;
  const bool is_f32 = matrix.type() == kFloat32;
  check(k % kEight == 0, "the inputs must be a multiple of 8");
  const int64_t words = is_f32 ? k : k / 2;
  const void* rows = matrix.rows_at(model_type(is_f32), kCpu, "matrix", {kAny, kAny});
  void* out = is_f32 ? static_cast<void*>(data.at<float>(kCpu, "data", {blocks, k, kBlock}))
                   : data.at<Bfloat16>(kCpu, "data", {blocks, words, kBlock, 2});
  check(is_f32 || n == 1 || matrix.stride(0) % 2 == 0, "rows must be aligned to 4 bytes");
  const int64_t stride = is_f32 ? matrix.stride(0) : matrix.stride(0) / 2;
  py::gil_scoped_release unlocked;
  host::pack_rows(static_cast<const uint32_t*>(rows), n, words, stride, static_cast<uint32_t*>(out));
}

void pack_int8(const Array& matrix, const Array& data, const Array& scales) {
  const int64_t n = matrix.size(0), k = matrix.size(1), blocks = (n + kBlock - 1) / kBlock, groups = scales.size(1);
  const bool is_f32 = matrix.type() == kFloat32;
  check(groups > 0 && k % groups == 0 && k / groups % kEight == 0 && k / groups <= 128,
        "a group must be a multiple of 8, at most 128, that divides k");
  const void* rows = matrix.rows_at(model_type(is_f32), kCpu, "matrix", {kAny, kAny});
  auto* words = data.at<uint32_t>(kCpu, "data", {blocks, k / 4, kBlock});
  auto* to_scales = scales.at<Bfloat16>(kCpu, "scales", {blocks, groups, kBlock});
  py::gil_scoped_release unlocked;
  host::pack_int8(rows, is_f32, n, k, matrix.stride(0), k / groups, words, to_scales);
}

void pack_blocks(const Array& rows, const std::string& type, int64_t first, const Array& data, const Array& scales,
                 const MaybeArray& minima, const MaybeArray& super_scales, const MaybeArray& super_minima) {
  const auto layout = host::block_layout(type);
  check(layout.has_value(), "an unknown type of blocks");
  check(rows.size(1) % layout->bytes == 0, "rows must consist of whole blocks");
  const int64_t n = rows.size(0), k = rows.size(1) / layout->bytes * layout->inputs, blocks = data.size(0);
  check(first >= 0 && first + n <= blocks * kBlock, "the outputs do not fit the blocks");
  check(minima.has_value() == layout->minima, "this type of blocks has minima, or it has none");
  const bool supers = layout->scale_bytes == 1;
  check(supers == super_scales.has_value() && (supers && minima) == super_minima.has_value(),
        "this type of blocks has super-scales, or it has none");
  const Type kind = supers ? layout->signed_scales ? kInt8 : kUint8 : kFloat16;
  const auto super = [&](const MaybeArray& array, const char* name) {
    void* at = array ? array->at(kFloat16, kCpu, name, {blocks, k / layout->inputs, kBlock}) : nullptr;
    return static_cast<uint16_t*>(at);
  };
  const host::BlockPart part{static_cast<const uint8_t*>(rows.rows_at(kUint8, kCpu, "rows", {kAny, kAny})),
                             rows.stride(0), n, k};
  const host::BlockTargets to{
      data.at<uint32_t>(kCpu, "data", {blocks, k * layout->bits / 32, kBlock}),
      scales.at(kind, kCpu, "scales", {blocks, k / layout->group, kBlock}),
      minima ? minima->at(kind, kCpu, "minima", {blocks, k / layout->group, kBlock}) : nullptr,
      super(super_scales, "super_scales"), super(super_minima, "super_minima")};
  py::gil_scoped_release unlocked;
  layout->pack(part, first, to);
}

py::bytes checksums(const Array& data) {
  const int64_t bytes = data.count(), pieces = (bytes + host::kChecksumBlockBytes - 1) / host::kChecksumBlockBytes;
  const auto* from = data.at<uint8_t>(kCpu, "data", {kAny});
  std::vector<uint64_t> sums(static_cast<size_t>(pieces));
  {
    py::gil_scoped_release unlocked;
    host::checksums(from, bytes, sums.data());
  }
  return {reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(uint64_t)};
}

}  // namespace

void bind_pack(py::module_& m) {
  m.def("pack_int4", &pack_int4, py::arg("codes"), py::arg("scales"), py::arg("zeros"), py::arg("order"),
        py::arg("first"), py::arg("data"), py::arg("block_scales"), py::arg("block_zeros"),
        "Packs n outputs of an int4 matrix into blocks, from output `first` on. `order` \"outputs\" or \"awq\": codes "
        "[k, n / 8] int32, scales [k / group, n], zeros [k / group, n / 8]; \"inputs\": codes [n, k / 8], scales "
        "[n, k / group], zeros [n / 8, k / group]; \"gptq\": codes [k / 8, n], scales and zeros as for \"outputs\". "
        "`zeros` None: 8.");
  m.def("pack_blocks", &pack_blocks, py::arg("rows"), py::arg("type"), py::arg("first"), py::arg("data"),
        py::arg("scales"), py::arg("minima"), py::arg("super_scales"), py::arg("super_minima"),
        "Packs n rows of GGML's quantised blocks [n, bytes] uint8 of type \"Q4_0\", \"Q4_1\", \"Q4_K\" (to int4), "
        "\"Q8_0\", \"Q5_K\" or \"Q6_K\" (to int8) as the outputs from `first` on. `minima`: of Q4_1, Q4_K and Q5_K. "
        "`super_scales`, `super_minima`: of the K types.");
  m.def("pack_dense", &pack_dense, py::arg("matrix"), py::arg("data"),
        "Packs a bfloat16 or float32 matrix [n, k] into blocks of 16 outputs, padded with zeros.");
  m.def("pack_int8", &pack_int8, py::arg("matrix"), py::arg("data"), py::arg("scales"),
        "Quantises a bfloat16 or float32 matrix [n, k] to int8 and packs it into blocks of 16 outputs.");
  m.def("checksums", &checksums, py::arg("data"),
        "One 8-byte checksum per started MiB of `data` [n] uint8. Every bit of the data changes it.");
}

}  // namespace swiftspec::binding
