// Moves of cache slots on a GPU.
#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

void move_kv(uintptr_t keys, uintptr_t values, int64_t layer_stride, int64_t layers, int64_t kv_heads, int64_t capacity,
             int64_t slot_bytes, uintptr_t source, int64_t count, int64_t start, uintptr_t stream) {
  check(layers >= 1 && layers < 65536 && kv_heads >= 1, "between 1 and 65535 layers");
  check(slot_bytes >= 16 && slot_bytes % 16 == 0 && layer_stride % 16 == 0, "slots must be multiples of 16 bytes");
  check(count >= 1 && start >= 0 && start + count <= capacity, "the slots do not fit the region");
  const MoveArgs args{
      static_cast<uint8_t*>(aligned_arg("keys", keys)), layer_stride, layers, kv_heads, capacity, slot_bytes,
      device_arg<const int64_t>("source", source),      count,        start};
  cuda::move_kv(args, static_cast<uint8_t*>(aligned_arg("values", values)), stream_arg(stream));
}

}  // namespace

void bind_cuda_cache(py::module_& m) {
  m.def("move_kv_cuda", &move_kv, py::arg("keys"), py::arg("values"), py::arg("layer_stride"), py::arg("layers"),
        py::arg("kv_heads"), py::arg("capacity"), py::arg("slot_bytes"), py::arg("source"), py::arg("count"),
        py::arg("start"), py::arg("stream"));
}

}  // namespace swiftspec::binding
