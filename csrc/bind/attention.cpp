// Attention on the CPU.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>

#include "bind/attention_options.h"
#include "bind/cache.h"
#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

// weight and epsilon of an RMSNorm
using NormArgs = std::tuple<Array, float>;
// sums of squares [rows, 2] of all query heads and of all key heads, and their numbers of elements
using SumArgs = std::tuple<Array, int64_t, int64_t>;

// The rows of one sequence in a forward, which attend in every layer of one kind.
struct AttentionRows {
  const Cache& cache;
  int64_t sequence;
  bool is_f32;
  host::AttentionArgs args;  // without what differs between layers
};

std::unique_ptr<AttentionRows> make_rows(const Array& cos, const Array& sin, const Array& slots, const Array& mask,
                                         const Cache& cache, int64_t sequence, int64_t length,
                                         const OptionArgs& options) {
  const int64_t rows = cos.size(0), dim = cache.head_dim, width = mask.size(1);
  const bool is_f32 = cos.type() == kFloat32;
  const Type type = model_type(is_f32);
  check_head_dim(dim);
  check(length >= 1 && length <= cache.capacity && width <= length, "width <= length <= capacity must hold");
  check(cache.type == type || (is_f32 && cache.type == kBfloat16), "the cache does not fit the queries");
  host::AttentionArgs args{};
  args.cos = cos.at(type, kCpu, "cos", {rows, dim});
  args.sin = sin.at(type, kCpu, "sin", {rows, dim});
  args.slots = slots.at<int64_t>(kCpu, "slots", {rows});
  args.mask = mask.at<bool>(kCpu, "mask", {rows, kAny});
  args.rows = rows, args.kv_heads = cache.kv_heads, args.capacity = cache.capacity;
  args.length = length, args.width = width, args.dim = dim;
  args.options = attention_options(options, rows);
  check_range(args.slots, rows, length, "a slot is not in use");
  return std::make_unique<AttentionRows>(AttentionRows{cache, sequence, is_f32, args});
}

void attend(const AttentionRows& rows, const Array& qkv, int64_t layer, const Array& out,
            const std::optional<NormArgs>& norm, const std::optional<SumArgs>& sums, const MaybeArray& sinks) {
  host::AttentionArgs args = rows.args;
  const Cache& cache = rows.cache;
  const int64_t dim = args.dim, heads = out.size(1) / dim;
  const Type type = model_type(rows.is_f32);
  check(heads >= cache.kv_heads && heads % cache.kv_heads == 0, "heads must be a multiple of kv_heads");
  args.heads = heads, args.shares_kv = qkv.size(1) == heads * dim;
  const int64_t own_kv_heads = args.shares_kv ? 0 : cache.kv_heads;
  args.stride = (heads + 2 * own_kv_heads) * dim;
  if (norm) args.norm = head_norm(std::get<0>(*norm), std::get<1>(*norm), heads, own_kv_heads, dim);
  if (sums) {
    const auto& [squares, q_size, k_size] = *sums;
    check(q_size > 0 && k_size > 0 && !args.norm.values, "sums need the sizes of the projections");
    check(!args.options.norm_after_rope, "a norm of whole projections must come before RoPE");
    args.norm.sums = squares.at<float>(kCpu, "sums", {args.rows, 2});
    args.norm.q_size = static_cast<float>(q_size), args.norm.k_size = static_cast<float>(k_size);
  }
  const int64_t skipped = cache.offset(layer, rows.sequence);
  args.keys = cache.keys + skipped, args.values = cache.values + skipped;
  args.qkv = qkv.at(type, kCpu, "qkv", {args.rows, args.stride});
  args.out = out.at(type, kCpu, "out", {args.rows, heads * dim});
  args.sinks = at_or_null<float>(sinks, kCpu, "sinks", {heads});
  py::gil_scoped_release unlocked;
  host::attention(args, rows.is_f32, cache.type == kFloat32);
}

void projection_sums(const Array& qkv, int64_t heads, int64_t kv_heads, int64_t dim, const MaybeArray& counted,
                     const Array& sums) {
  const int64_t rows = qkv.size(0);
  const bool is_f32 = qkv.type() == kFloat32;
  check(heads >= 1 && kv_heads >= 1 && dim >= 1, "heads, kv_heads and dim must be at least 1");
  const void* from = qkv.at(model_type(is_f32), kCpu, "qkv", {kAny, (heads + 2 * kv_heads) * dim});
  const auto* counts = at_or_null<bool>(counted, kCpu, "counted", {kv_heads});
  auto* to = sums.at<float>(kCpu, "sums", {rows, 2});
  py::gil_scoped_release unlocked;
  host::projection_sums(from, rows, heads, kv_heads, dim, counts, to, is_f32);
}

}  // namespace

void bind_attention(py::module_& m) {
  py::class_<AttentionRows>(m, "AttentionRows",
                            "The rows of one sequence in a forward, with `length` slots in use, for all attention layers "
                            "of one kind; see AttentionArgs in kernels_host.h. Keeps all arguments alive.")
      .def(py::init(&make_rows), py::arg("cos"), py::arg("sin"), py::arg("slots"), py::arg("mask"), py::arg("cache"),
           py::arg("sequence"), py::arg("length"), py::arg("options"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 9>(),
           "`options`: window, scale of scores, soft cap, scale of queries [rows], whether the norm of heads comes after "
           "RoPE.")
      .def("attend", &attend, py::arg("qkv"), py::arg("layer"), py::arg("out"), py::arg("norm"), py::arg("sums"),
           py::arg("sinks"),
           "RoPE, KV append and masked attention. With queries only, qkv [rows, heads * head_dim], nothing is appended. "
           "`norm`: weight and epsilon of the norm of heads. `sums`: of a norm of whole projections the sums of squares "
           "[rows, 2] and the elements of all query and of all key heads.");
  m.def("projection_sums", &projection_sums, py::arg("qkv"), py::arg("heads"), py::arg("kv_heads"), py::arg("dim"),
        py::arg("counted"), py::arg("sums"),
        "Sums of squares of all query heads and of all key heads that are `counted`: `sums` [rows, 2].");
}

}  // namespace swiftspec::binding
