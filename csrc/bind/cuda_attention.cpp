// Attention on a GPU.
#include <cmath>

#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

cuda::AttentionSetup make_setup(uintptr_t cos, uintptr_t sin, uintptr_t positions, uintptr_t slots, uintptr_t sequence,
                                uintptr_t kv_len, uintptr_t mask, uintptr_t owner, uintptr_t tail, uintptr_t count,
                                uintptr_t groups, uintptr_t arrived, uintptr_t part_values, uintptr_t part_sums,
                                int64_t rows, int64_t width, int64_t sequences, int64_t heads, int64_t kv_heads,
                                int64_t capacity, int64_t dim, int64_t clusters) {
  check(dim == 64 || dim == 128, "dim must be 64 or 128");
  check(kv_heads >= 1 && heads >= kv_heads && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  check(heads / kv_heads <= 64, "at most 64 heads share keys");
  check(kv_heads < 65536 && rows >= 1 && int32_sized(rows), "no rows, or too many rows or heads");
  check(width >= 1 && capacity >= 1 && sequences >= 1 && clusters >= 1, "sizes must be above 0");
  check(int32_sized(rows * width) && int32_sized(sequences * capacity), "the mask or the cache is too large");
  check(sequences == 1 || sequence != 0, "rows of several sequences need `sequence`");
  return {aligned_arg("cos", cos),
          aligned_arg("sin", sin),
          device_arg<const int64_t>("positions", positions),
          device_arg<const int64_t>("slots", slots),
          device_arg<const int64_t>("sequence", sequence, true),
          device_arg<const int64_t>("kv_len", kv_len),
          device_arg<const uint8_t>("mask", mask),
          device_arg<int32_t>("owner", owner),
          device_arg<int32_t>("tail", tail),
          device_arg<int32_t>("count", count),
          device_arg<cuda::RowGroup>("groups", groups),
          device_arg<uint32_t>("arrived", arrived),
          device_arg<float>("part_values", part_values),
          device_arg<float>("part_sums", part_sums),
          rows,
          width,
          sequences,
          heads,
          kv_heads,
          capacity,
          dim,
          clusters,
          1.44269504f / std::sqrt(static_cast<float>(dim))};
}

void prepare(const cuda::AttentionSetup& setup, uintptr_t stream) {
  cuda::prepare_attention(setup, stream_arg(stream));
}

void attend(const cuda::AttentionSetup& setup, uintptr_t qkv, uintptr_t keys, uintptr_t values, uintptr_t out,
            uintptr_t stream) {
  cuda::attention(setup, aligned_arg("qkv", qkv), aligned_arg("keys", keys), aligned_arg("values", values),
                  aligned_arg("out", out), stream_arg(stream));
}

}  // namespace

void bind_cuda_attention(py::module_& m) {
  py::class_<cuda::AttentionSetup>(m, "CudaAttention",
                                   "What attention needs on a device; see AttentionSetup in kernels_cuda.h.")
      .def(py::init(&make_setup), py::kw_only(), py::arg("cos"), py::arg("sin"), py::arg("positions"), py::arg("slots"),
           py::arg("sequence"), py::arg("kv_len"), py::arg("mask"), py::arg("owner"), py::arg("tail"), py::arg("count"),
           py::arg("groups"), py::arg("arrived"), py::arg("part_values"), py::arg("part_sums"), py::arg("rows"),
           py::arg("width"), py::arg("sequences"), py::arg("heads"), py::arg("kv_heads"), py::arg("capacity"),
           py::arg("dim"), py::arg("clusters"))
      .def("prepare", &prepare, py::arg("stream"), "Once a forward, before the layers.")
      .def("attend", &attend, py::arg("qkv"), py::arg("keys"), py::arg("values"), py::arg("out"), py::arg("stream"),
           "Once a layer.");
  m.def("attention_groups_cuda", &cuda::attention_groups, py::arg("rows"), py::arg("heads"), py::arg("kv_heads"),
        py::arg("one_sequence"), "How many groups of rows a setup has room for.");
  m.def("attention_lines_cuda", &cuda::attention_lines, py::arg("rows"), py::arg("heads"), py::arg("capacity"),
        "How many lines of `part_values` and `part_sums` a setup needs.");
  m.def("attention_clusters_cuda", &cuda::attention_clusters, py::arg("dim"),
        "How many clusters of attention the current device holds at a time.");
}

}  // namespace swiftspec::binding
