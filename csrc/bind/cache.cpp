// Moves of cache slots on the CPU.
#include <pybind11/stl.h>

#include <vector>

#include "bind/arguments.h"
#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

void move_kv(uintptr_t keys, uintptr_t values, int64_t layer_stride, int64_t layers, int64_t kv_heads, int64_t capacity,
             int64_t slot_bytes, const std::vector<int64_t>& source, int64_t start) {
  const auto count = static_cast<int64_t>(source.size());
  size_arg("layers", layers, 1);
  size_arg("kv_heads", kv_heads, 1);
  size_arg("slot_bytes", slot_bytes, 1);
  check(start >= 0 && count >= 0 && start + count <= capacity, "the slots do not fit the region");
  MoveArgs args{pointer_arg<uint8_t>("keys", keys, 1),
                layer_stride,
                layers,
                kv_heads,
                capacity,
                slot_bytes,
                source.data(),
                count,
                start};
  auto* region = pointer_arg<uint8_t>("values", values, 1);
  for (int64_t i = 0; i < count; ++i) {
    check(args.source[i] >= start + i && args.source[i] < capacity, "a source lies before its place or outside");
    check(i == 0 || args.source[i] > args.source[i - 1], "sources must ascend");
  }
  py::gil_scoped_release unlocked;
  host::move_kv(args);
  args.region = region;
  host::move_kv(args);
}

}  // namespace

void bind_cache(py::module_& m) {
  m.def("move_kv", &move_kv, py::arg("keys"), py::arg("values"), py::arg("layer_stride"), py::arg("layers"),
        py::arg("kv_heads"), py::arg("capacity"), py::arg("slot_bytes"), py::arg("source"), py::arg("start"),
        "Moves cache slots forward in place; see MoveArgs in kernels_host.h.");
}

}  // namespace swiftspec::binding
