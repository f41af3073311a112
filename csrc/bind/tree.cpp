// The draft tree, and what a draft is ready to reply from it. Who holds one of these keeps what it was given alive.
#include "host/decoder/tree.h"

#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>

#include "bind/arguments.h"
#include "bind/module.h"
#include "host/decoder/fast_reply.h"

namespace swiftspec::binding {

namespace {

using host::Nodes;
using host::Tree;

std::unique_ptr<Tree> make_tree(uintptr_t token, uintptr_t parent, uintptr_t slot, uintptr_t logprob, uintptr_t visible,
                                uintptr_t sizes, int64_t nodes, int64_t slots) {
  size_arg("nodes", nodes, 1);
  size_arg("slots", slots, 1);
  return std::make_unique<Tree>(
      Tree{pointer_arg<int64_t>("token", token, nodes), pointer_arg<int64_t>("parent", parent, nodes),
           pointer_arg<int64_t>("slot", slot, nodes), pointer_arg<double>("logprob", logprob, nodes),
           pointer_arg<uint8_t>("visible", visible, slots), pointer_arg<int64_t>("sizes", sizes, 2), nodes, slots});
}

void check_node(const Tree& tree, int64_t node) {
  check(node >= 0 && node < tree.count(), "a node that the tree does not have");
}

// nodes, their tokens, their parents by index among them
std::tuple<Nodes, Nodes, Nodes> best_subtree(const Tree& tree, int64_t bs, int64_t root) {
  size_arg("bs", bs, 1);
  check_node(tree, root);
  host::SubTree found = tree.best_subtree(bs, root);
  return {std::move(found.nodes), std::move(found.tokens), std::move(found.parents)};
}

std::pair<double, double> prospects(const Tree& tree, int64_t bs, int64_t w, int64_t root) {
  size_arg("bs", bs, 1);
  size_arg("w", w, 1);
  check_node(tree, root);
  return tree.prospects(bs, w, root);
}

std::pair<Nodes, Nodes> reroot(Tree& tree, int64_t node) {
  check_node(tree, node);
  Nodes path, kept;
  tree.reroot(node, path, kept);
  return {std::move(path), std::move(kept)};
}

host::FastReply offer(const Tree& tree, int32_t request, int32_t prefix_len, int64_t bs, int64_t w, int64_t steps,
                      double worth) {
  size_arg("bs", bs, 1);
  size_arg("w", w, 1);
  size_arg("steps", steps, 1);
  return {tree, request, prefix_len, bs, w, steps, worth};
}

}  // namespace

void bind_tree(py::module_& m) {
  py::class_<Tree>(m, "Tree", "A draft tree on arrays that Python holds; see host/decoder/tree.h.")
      .def(py::init(&make_tree), py::arg("token"), py::arg("parent"), py::arg("slot"), py::arg("logprob"),
           py::arg("visible"), py::arg("sizes"), py::arg("nodes"), py::arg("slots"))
      .def("best_subtree", &best_subtree, py::arg("bs"), py::arg("root"))
      .def("prospects", &prospects, py::arg("bs"), py::arg("w"), py::arg("root"))
      .def("walk", &Tree::walk, py::arg("tokens"))
      .def("reroot", &reroot, py::arg("node"))
      .def("offer", &offer, py::arg("request"), py::arg("prefix_len"), py::arg("bs"), py::arg("w"), py::arg("steps"),
           py::arg("worth"), py::keep_alive<0, 1>());
  py::class_<host::FastReply>(m, "Offer", "What a draft is ready to reply; see host/decoder/fast_reply.h.")
      .def("answer", &host::fast_reply, py::arg("result"));
}

}  // namespace swiftspec::binding
