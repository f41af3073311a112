// Attention on the CPU.
#include <pybind11/stl.h>

#include <optional>

#include "bind/attention_options.h"
#include "bind/cache.h"
#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

void attention(const Array& qkv, const Array& cos, const Array& sin, const Array& slots, const Array& mask,
               const Cache& cache, int64_t layer, int64_t sequence, int64_t length, const Array& out,
               const MaybeArray& qk_norm, float eps, std::optional<int64_t> window, std::optional<float> scale,
               std::optional<float> softcap, const MaybeArray& query_scale, bool norm_after_rope,
               const MaybeArray& norm_sums, int64_t q_size, int64_t k_size, const MaybeArray& sinks) {
  const int64_t rows = qkv.size(0), dim = cache.head_dim, width = mask.size(1);
  check_head_dim(dim);
  const int64_t heads = out.size(1) / dim;
  const bool shares_kv = qkv.size(1) == heads * dim;
  const int64_t own_kv_heads = shares_kv ? 0 : cache.kv_heads, qkv_size = (heads + 2 * own_kv_heads) * dim;
  const bool is_f32 = qkv.type() == kFloat32;
  const Type type = model_type(is_f32);
  check(heads >= cache.kv_heads && heads % cache.kv_heads == 0, "heads must be a multiple of kv_heads");
  check(length >= 1 && length <= cache.capacity && width <= length, "width <= length <= capacity must hold");
  check(cache.type == type || (is_f32 && cache.type == kBfloat16), "the cache does not fit the queries");
  host::HeadNorm norm = head_norm(qk_norm, eps, heads, own_kv_heads, dim);
  norm.sums = at_or_null<float>(norm_sums, kCpu, "norm_sums", {rows, 2});
  check(norm.sums == nullptr || (q_size > 0 && k_size > 0 && !norm.values), "sums need the sizes of the projections");
  check(norm.sums == nullptr || !norm_after_rope, "a norm of whole projections must come before RoPE");
  if (norm.sums != nullptr) norm.q_size = static_cast<float>(q_size), norm.k_size = static_cast<float>(k_size);
  const int64_t skipped = cache.offset(layer, sequence);
  const host::AttentionArgs args{qkv.at(type, kCpu, "qkv", {kAny, qkv_size}),
                                 cos.at(type, kCpu, "cos", {rows, dim}),
                                 sin.at(type, kCpu, "sin", {rows, dim}),
                                 slots.at<int64_t>(kCpu, "slots", {rows}),
                                 mask.at<bool>(kCpu, "mask", {rows, kAny}),
                                 cache.keys + skipped,
                                 cache.values + skipped,
                                 out.at(type, kCpu, "out", {rows, heads * dim}),
                                 rows,
                                 heads,
                                 cache.kv_heads,
                                 cache.capacity,
                                 length,
                                 width,
                                 dim,
                                 qkv_size,
                                 attention_options(window, scale, softcap, query_scale, norm_after_rope, rows),
                                 norm,
                                 at_or_null<float>(sinks, kCpu, "sinks", {heads}),
                                 shares_kv};
  check_range(args.slots, rows, length, "a slot is not in use");
  py::gil_scoped_release unlocked;
  host::attention(args, is_f32, cache.type == kFloat32);
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
  m.def("attention", &attention, py::arg("qkv"), py::arg("cos"), py::arg("sin"), py::arg("slots"), py::arg("mask"),
        py::arg("cache"), py::arg("layer"), py::arg("sequence"), py::arg("length"), py::arg("out"), py::arg("qk_norm"),
        py::arg("eps"), py::arg("window"), py::arg("scale"), py::arg("softcap"), py::arg("query_scale"),
        py::arg("norm_after_rope"), py::arg("norm_sums"), py::arg("q_size"), py::arg("k_size"), py::arg("sinks"),
        "RoPE, KV append and masked attention of the rows of one sequence with `length` slots in use; see "
        "AttentionArgs in kernels_host.h. With queries only, qkv [rows, heads * head_dim], nothing is appended.");
  m.def("projection_sums", &projection_sums, py::arg("qkv"), py::arg("heads"), py::arg("kv_heads"), py::arg("dim"),
        py::arg("counted"), py::arg("sums"),
        "Sums of squares of all query heads and of all key heads that are `counted`: `sums` [rows, 2].");
}

}  // namespace swiftspec::binding
