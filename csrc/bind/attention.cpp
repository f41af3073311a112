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
               std::optional<float> softcap, const MaybeArray& query_scale) {
  const int64_t rows = qkv.size(0), dim = cache.head_dim, width = mask.size(1);
  const int64_t heads = qkv.size(1) / dim - 2 * cache.kv_heads;
  const bool is_f32 = qkv.type() == kFloat32;
  const Type type = model_type(is_f32);
  check(dim % 16 == 0 && dim >= 16 && dim <= 256, "head_dim must be a multiple of 16 up to 256");
  check(heads >= cache.kv_heads && heads % cache.kv_heads == 0, "heads must be a multiple of kv_heads");
  check(length >= 1 && length <= cache.capacity && width <= length, "width <= length <= capacity must hold");
  check(cache.type == type, "the cache is not of the model's type");
  const int64_t skipped = cache.offset(layer, sequence);
  const host::AttentionArgs args{qkv.at(type, kCpu, "qkv", {kAny, (heads + 2 * cache.kv_heads) * dim}),
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
                                 attention_options(window, scale, softcap, query_scale, rows),
                                 head_norm(qk_norm, eps, heads, cache.kv_heads, dim)};
  check_range(args.slots, rows, length, "a slot is not in use");
  py::gil_scoped_release unlocked;
  host::attention(args, is_f32);
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("attention", &attention, py::arg("qkv"), py::arg("cos"), py::arg("sin"), py::arg("slots"), py::arg("mask"),
        py::arg("cache"), py::arg("layer"), py::arg("sequence"), py::arg("length"), py::arg("out"), py::arg("qk_norm"),
        py::arg("eps"), py::arg("window"), py::arg("scale"), py::arg("softcap"), py::arg("query_scale"),
        "RoPE, KV append and masked attention of the rows of one sequence with `length` slots in use; see "
        "AttentionArgs in kernels_host.h.");
}

}  // namespace swiftspec::binding
