// Attention on the CPU.
#include "bind/arguments.h"
#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

void attention(uintptr_t qkv, uintptr_t cos, uintptr_t sin, uintptr_t slots, uintptr_t mask, uintptr_t keys,
               uintptr_t values, uintptr_t out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t capacity,
               int64_t length, int64_t width, int64_t dim, bool wide) {
  size_arg("rows", rows, 0);
  size_arg("kv_heads", kv_heads, 1);
  size_arg("length", length, 1);
  check(heads >= kv_heads && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  check(dim % 16 == 0 && dim >= 16 && dim <= 256, "dim must be a multiple of 16 up to 256");
  check(length <= capacity && width >= 0 && width <= length, "width <= length <= capacity must hold");
  const host::AttentionArgs args{type_arg("qkv", qkv, wide, rows),
                                 type_arg("cos", cos, wide, rows),
                                 type_arg("sin", sin, wide, rows),
                                 pointer_arg<const int64_t>("slots", slots, rows),
                                 pointer_arg<const uint8_t>("mask", mask, rows * width),
                                 type_arg("keys", keys, wide, rows),
                                 type_arg("values", values, wide, rows),
                                 type_arg("out", out, wide, rows),
                                 rows,
                                 heads,
                                 kv_heads,
                                 capacity,
                                 length,
                                 width,
                                 dim};
  for (int64_t row = 0; row < rows; ++row) {
    check(args.slots[row] >= 0 && args.slots[row] < length, "a slot lies outside the slots in use");
  }
  py::gil_scoped_release unlocked;
  host::attention(args, wide);
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("attention", &attention, py::arg("qkv"), py::arg("cos"), py::arg("sin"), py::arg("slots"), py::arg("mask"),
        py::arg("keys"), py::arg("values"), py::arg("out"), py::arg("rows"), py::arg("heads"), py::arg("kv_heads"),
        py::arg("capacity"), py::arg("length"), py::arg("width"), py::arg("dim"), py::arg("wide"),
        "RoPE, KV append and masked attention; see AttentionArgs in kernels_host.h.");
}

}  // namespace swiftspec::binding
