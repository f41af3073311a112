// Bindings of a draft tree on a GPU and the rows of its expansions.
#include <memory>

#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

struct DeviceTree {
  cuda::TreeState tree;
  cuda::Expansion rows;
  int32_t w, children;
};

std::unique_ptr<DeviceTree> make_tree(const Array& token, const Array& parent, const Array& slot, const Array& weight,
                                   const Array& visible, const Array& used, const Array& node, const Array& tokens,
                                   const Array& positions, const Array& slots, const Array& mask, int64_t children) {
  const int64_t nodes = token.size(0), room = visible.size(1), w = node.size(0);
  check(nodes >= 1 && room >= 1 && int32_sized(nodes) && int32_sized(room), "nodes and slots must be above 0");
  check(w >= 1 && w <= 64 && w <= room, "w must lie in 1..64 and within the slots");
  check(children >= 1 && w * children < nodes, "w times the children must lie below the nodes");
  const Device here = gpu();
  const cuda::TreeState tree{token.at<int64_t>(here, "token", {nodes}),
                             parent.at<int32_t>(here, "parent", {nodes}),
                             slot.at<int32_t>(here, "slot", {nodes}),
                             weight.at<double>(here, "weight", {nodes}),
                             visible.at<bool>(here, "visible", {room, room}),
                             used.at<int32_t>(here, "used", {2}),
                             static_cast<int32_t>(nodes),
                             static_cast<int32_t>(room)};
  const cuda::Expansion rows{node.at<int32_t>(here, "node", {w}), tokens.at<int64_t>(here, "tokens", {w}),
                             positions.at<int64_t>(here, "positions", {w}), slots.at<int64_t>(here, "slots", {w}),
                             mask.at<bool>(here, "mask", {w, room})};
  return std::make_unique<DeviceTree>(DeviceTree{tree, rows, static_cast<int32_t>(w), static_cast<int32_t>(children)});
}

void leaves(const DeviceTree& tree, const Array& prefix, uintptr_t stream) {
  cuda::tree_leaves(tree.tree, tree.w, prefix.at<int64_t>(gpu(), "prefix", {1}), tree.rows,
                    stream_arg(stream));
}

void add(const DeviceTree& tree, const Array& tokens, const Array& values, uintptr_t stream) {
  const Device here = gpu();
  const Shape shape{tree.w, tree.children};
  cuda::tree_add(tree.tree, tree.w, tree.rows.node, tree.children, tokens.at<int64_t>(here, "tokens", shape),
                 values.at<float>(here, "values", shape), stream_arg(stream));
}

void root(const DeviceTree& tree, const Array& token, const Array& slot, const Array& region, const Array& tokens,
          const Array& values, uintptr_t stream) {
  const Device here = gpu();
  const Shape shape{1, tree.children};
  cuda::tree_root(tree.tree, token.at<int64_t>(here, "token", {1}), slot.at<int64_t>(here, "slot", {1}),
                  region.at<int64_t>(here, "region", {2}), tree.children, tokens.at<int64_t>(here, "tokens", shape),
                  values.at<float>(here, "values", shape), stream_arg(stream));
}

}  // namespace

void bind_cuda_tree(py::module_& m) {
  using py::keep_alive;
  py::class_<DeviceTree>(
      m, "CudaTree",
      "A draft tree on a GPU and the rows of its next expansion, which it keeps alive; see TreeState "
      "and Expansion in kernels_cuda.h.")
      .def(py::init(&make_tree), py::kw_only(), py::arg("token"), py::arg("parent"), py::arg("slot"), py::arg("weight"),
           py::arg("visible"), py::arg("used"), py::arg("node"), py::arg("tokens"), py::arg("positions"),
           py::arg("slots"), py::arg("mask"), py::arg("children"), keep_alive<1, 2>(), keep_alive<1, 3>(),
           keep_alive<1, 4>(), keep_alive<1, 5>(), keep_alive<1, 6>(), keep_alive<1, 7>(), keep_alive<1, 8>(),
           keep_alive<1, 9>(), keep_alive<1, 10>(), keep_alive<1, 11>(), keep_alive<1, 12>())
      .def("leaves", &leaves, py::arg("prefix"), py::arg("stream"),
           "Assigns the next tree slots to the best leaves and writes their rows. `prefix` [1] int64: slots before "
           "the tree's.")
      .def("add", &add, py::arg("tokens"), py::arg("values"), py::arg("stream"),
           "Children [w, children] of these rows: tokens int64, log-probabilities float32.")
      .def("root", &root, py::arg("token"), py::arg("slot"), py::arg("region"), py::arg("tokens"), py::arg("values"),
           py::arg("stream"),
           "Replaces the tree by its root, expanded, and the children [1, children]. `token`, `slot` [1] int64: the "
           "root's. `region` [2] int64: receives the number of slots before the tree and that up to its end.");
}

}  // namespace swiftspec::binding
