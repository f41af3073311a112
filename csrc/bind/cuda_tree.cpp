// A draft tree on a GPU.
#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

cuda::TreeState tree_state(uintptr_t token, uintptr_t parent, uintptr_t slot, uintptr_t weight, uintptr_t visible,
                           uintptr_t used, int64_t nodes, int64_t slots) {
  check(nodes >= 1 && slots >= 1 && int32_sized(nodes) && int32_sized(slots), "nodes and slots must be above 0");
  return {device_arg<int64_t>("token", token),
          device_arg<int32_t>("parent", parent),
          device_arg<int32_t>("slot", slot),
          device_arg<double>("weight", weight),
          device_arg<uint8_t>("visible", visible),
          device_arg<int32_t>("used", used),
          static_cast<int32_t>(nodes),
          static_cast<int32_t>(slots)};
}

void tree_leaves(const cuda::TreeState& tree, int64_t w, uintptr_t prefix, uintptr_t node, uintptr_t tokens,
                 uintptr_t positions, uintptr_t slots, uintptr_t mask, uintptr_t stream) {
  check(w >= 1 && w <= 64 && w <= tree.slots, "w must lie in 1..64 and within the slots");
  const cuda::Expansion out{device_arg<int32_t>("node", node), device_arg<int64_t>("tokens", tokens),
                            device_arg<int64_t>("positions", positions), device_arg<int64_t>("places", slots),
                            device_arg<uint8_t>("mask", mask)};
  cuda::tree_leaves(tree, static_cast<int32_t>(w), device_arg<const int64_t>("prefix", prefix), out,
                    stream_arg(stream));
}

void tree_add(const cuda::TreeState& tree, int64_t w, uintptr_t node, int64_t k, uintptr_t tokens, uintptr_t values,
              uintptr_t stream) {
  check(w >= 1 && w <= 64 && k >= 1 && w * k < tree.nodes, "w must lie in 1..64, and w k below the nodes");
  cuda::tree_add(tree, static_cast<int32_t>(w), device_arg<const int32_t>("node", node), static_cast<int32_t>(k),
                 device_arg<const int64_t>("tokens", tokens), device_arg<const float>("values", values),
                 stream_arg(stream));
}

}  // namespace

void bind_cuda_tree(py::module_& m) {
  py::class_<cuda::TreeState>(m, "CudaTree", "A draft tree on a device; see TreeState in kernels_cuda.h.")
      .def(py::init(&tree_state), py::kw_only(), py::arg("token"), py::arg("parent"), py::arg("slot"),
           py::arg("weight"), py::arg("visible"), py::arg("used"), py::arg("nodes"), py::arg("slots"))
      .def("leaves", &tree_leaves, py::arg("w"), py::arg("prefix"), py::arg("node"), py::arg("tokens"),
           py::arg("positions"), py::arg("places"), py::arg("mask"), py::arg("stream"))
      .def("add", &tree_add, py::arg("w"), py::arg("node"), py::arg("k"), py::arg("tokens"), py::arg("values"),
           py::arg("stream"));
}

}  // namespace swiftspec::binding
