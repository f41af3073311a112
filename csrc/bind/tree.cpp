// The draft tree and the fast reply.
#include "host/decoder/tree.h"

#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/arguments.h"
#include "bind/module.h"
#include "host/decoder/fast_reply.h"

namespace swiftspec::binding {

namespace {

using host::Nodes;
using host::Tree;

std::unique_ptr<Tree> make_tree(const Array& token, const Array& parent, const Array& slot, const Array& logprob,
                                const Array& visible, const Array& sizes) {
  const int64_t nodes = size_arg("nodes", token.size(0), 1), slots = size_arg("slots", visible.size(1), 1);
  return std::make_unique<Tree>(Tree{token.at<int64_t>(kCpu, "token", {kAny}),
                                     parent.at<int64_t>(kCpu, "parent", {nodes}),
                                     slot.at<int64_t>(kCpu, "slot", {nodes}),
                                     logprob.at<double>(kCpu, "logprob", {nodes}),
                                     visible.at<bool>(kCpu, "visible", {slots + 1, slots}),
                                     sizes.at<int64_t>(kCpu, "sizes", {2}), nodes, slots});
}

void check_node(const Tree& tree, int64_t node) {
  check(node >= 0 && node < tree.count(), "a node that the tree does not have");
}

// Returns nodes, their tokens, the index of each parent among them, and their weights.
std::tuple<Nodes, Nodes, Nodes, std::vector<float>> best_subtree(const Tree& tree, int64_t bs, int64_t root) {
  size_arg("bs", bs, 1);
  check_node(tree, root);
  host::SubTree found = tree.best_subtree(bs, root);
  return {std::move(found.nodes), std::move(found.tokens), std::move(found.parents), std::move(found.weights)};
}

std::pair<double, double> prospects(const Tree& tree, int64_t bs, int64_t w, int64_t root) {
  size_arg("bs", bs, 1);
  size_arg("w", w, 1);
  check_node(tree, root);
  return tree.prospects(bs, w, root);
}

std::pair<Nodes, Nodes> reroot(Tree& tree, int64_t node) {
  check_node(tree, node);
  Nodes path, surviving;
  tree.reroot(node, path, surviving);
  return {std::move(path), std::move(surviving)};
}

host::FastReply fast_reply(const Tree& tree, int32_t request, int32_t prefix_len, int64_t bs, int64_t w, int64_t steps,
                           double expansion_yield) {
  size_arg("bs", bs, 1);
  size_arg("w", w, 1);
  size_arg("steps", steps, 1);
  return {tree, request, prefix_len, bs, w, steps, expansion_yield};
}

}  // namespace

void bind_tree(py::module_& m) {
  py::class_<host::FastReply>(m, "FastReply",
                              "The state from which a draft replies without Python; see host/decoder/fast_reply.h.")
      .def("reply", &host::fast_reply, py::arg("result"),
           "The packed proposal that follows a packed result; empty if Python must handle the result.");
  py::class_<Tree>(m, "Tree", "A draft tree on NumPy arrays, which it keeps alive; see host/decoder/tree.h.")
      .def(py::init(&make_tree), py::arg("token"), py::arg("parent"), py::arg("slot"), py::arg("logprob"),
           py::arg("visible"), py::arg("sizes"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(),
           "The arrays of `DraftTree` (swiftspec/tree/tree.py).")
      .def("best_subtree", &best_subtree, py::arg("bs"), py::arg("root"),
           "The likeliest nodes of the sub-tree of `root`, their tokens, the index of each parent among them, and their "
           "log-probabilities relative to `root`.")
      .def("prospects", &prospects, py::arg("bs"), py::arg("w"), py::arg("root"),
           "Probability mass, relative to `root`, of the bs likeliest nodes and of the w likeliest leaves.")
      .def("walk", &Tree::walk, py::arg("tokens"),
           "The path below the root that matches the longest prefix of `tokens`.")
      .def("reroot", &reroot, py::arg("node"),
           "Makes a node the root. Returns the tree slots from the old root to its parent, and the surviving ones.")
      .def("fast_reply", &fast_reply, py::arg("request"), py::arg("prefix_len"), py::arg("bs"), py::arg("w"),
           py::arg("steps"), py::arg("expansion_yield"), py::keep_alive<0, 1>(),
           "The state for replying to the next result of a request.");
}

}  // namespace swiftspec::binding
