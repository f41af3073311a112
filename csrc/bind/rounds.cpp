// The inner part of a round. Who holds one of these keeps what it was given alive.
#include "host/decoder/rounds.h"

#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>

#include "bind/arguments.h"
#include "bind/module.h"
#include "host/decoder/tree.h"

namespace swiftspec::binding {

namespace {

using host::Nodes;
using host::Region;
using host::Rounds;
using host::Scoring;
using host::Tree;

// bias [vocab], of which the columns of this rank are read
std::unique_ptr<Scoring> make_scoring(const Rounds& rounds, int64_t vocab, double temperature, uintptr_t bias,
                                      bool noisy, uint64_t seed, uint32_t stream) {
  size_arg("vocab", vocab, 1);
  check(temperature > 0, "temperature must be above 0");
  const host::Columns columns = rounds.columns(vocab);
  const auto* all = pointer_arg<const float>("bias", bias, 0);
  return std::make_unique<Scoring>(columns, temperature, all == nullptr ? nullptr : all + columns.first, noisy, seed,
                                   stream);
}

// A region's addresses, with room for `rows` slots after the prefix.
Region region_of(const host::Decoder& decoder, uintptr_t keys, uintptr_t values, int64_t capacity, int64_t layer_stride,
                 int64_t prefix, int64_t rows) {
  const host::Stack& stack = decoder.stack();
  check(prefix >= 0 && prefix + rows <= capacity, "the rows do not fit the cache");
  check(prefix + rows <= stack.positions, "a position lies outside the context");
  return {type_arg("keys", keys, stack.wide, 1), type_arg("values", values, stack.wide, 1), capacity, layer_stride,
          prefix};
}

// leaves expanded, seconds of the forward
std::pair<int64_t, double> expand(Rounds& rounds, Tree& tree, uintptr_t keys, uintptr_t values, int64_t capacity,
                                  int64_t layer_stride, int64_t prefix, const Nodes& pending, int64_t w, int64_t k,
                                  Scoring& scoring, bool coupled, double tau) {
  const host::Decoder& decoder = rounds.decoder();
  const int64_t ahead = static_cast<int64_t>(pending.size()), vocab = decoder.stack().vocab;
  size_arg("w", w, 1);
  check(tau > 0, "tau must be above 0");
  check(k >= 1 && k <= scoring.columns().vocab, "k must lie in 1..vocab");
  check(tree.expanded() + w <= tree.slots && tree.count() + w * k <= tree.nodes, "the tree is full");
  check(ahead == 0 || tree.expanded() == 0, "pending tokens go before the root");
  check(scoring.columns().count <= decoder.stack().head->n, "the scoring is another decoder's");
  check_inside(pending.data(), ahead, vocab, "a token lies outside the vocabulary");
  check_inside(tree.token, tree.count(), vocab, "a token lies outside the vocabulary");
  const Region region = region_of(decoder, keys, values, capacity, layer_stride, prefix, ahead + tree.expanded() + w);
  py::gil_scoped_release unlocked;
  const int64_t count = rounds.expand(tree, region, pending, w, k, scoring, coupled, tau);
  return {count, count == 0 ? 0.0 : rounds.seconds()};
}

// path, sampled tokens, seconds of the forward
std::tuple<Nodes, Nodes, double> verify(Rounds& rounds, const Nodes& tokens, const Nodes& parents, uintptr_t keys,
                                        uintptr_t values, int64_t capacity, int64_t layer_stride, int64_t prefix,
                                        Scoring& scoring) {
  const host::Decoder& decoder = rounds.decoder();
  const auto count = static_cast<int64_t>(tokens.size());
  size_arg("nodes", count, 1);
  check(parents.size() == tokens.size() && parents[0] == -1, "every node but the root has a parent");
  for (int64_t i = 1; i < count; ++i) {
    const int64_t parent = parents[static_cast<size_t>(i)];
    check(parent >= 0 && parent < i, "the nodes are not in topological order");
  }
  check(scoring.columns().count <= decoder.stack().head->n, "the scoring is another decoder's");
  check_inside(tokens.data(), count, decoder.stack().vocab, "a token lies outside the vocabulary");
  const Region region = region_of(decoder, keys, values, capacity, layer_stride, prefix, count);
  Nodes path, sampled;
  {
    py::gil_scoped_release unlocked;
    rounds.verify(tokens, parents, region, scoring, path, sampled);
  }
  return {std::move(path), std::move(sampled), rounds.seconds()};
}

}  // namespace

void bind_rounds(py::module_& m) {
  py::class_<Scoring>(m, "Scoring", "What makes tokens of one request's logits; see host/decoder/rounds.h.")
      .def(py::init(&make_scoring), py::arg("rounds"), py::arg("vocab"), py::arg("temperature"), py::arg("bias"),
           py::arg("noisy"), py::arg("seed"), py::arg("stream"));
  py::class_<Rounds>(m, "Rounds", "Expansions and verifications as one call each; see host/decoder/rounds.h.")
      .def(py::init<host::Decoder&>(), py::arg("decoder"), py::keep_alive<1, 2>())
      .def("expand", &expand, py::arg("tree"), py::arg("keys"), py::arg("values"), py::arg("capacity"),
           py::arg("layer_stride"), py::arg("prefix"), py::arg("pending"), py::arg("w"), py::arg("k"),
           py::arg("scoring"), py::arg("coupled"), py::arg("tau"))
      .def("verify", &verify, py::arg("tokens"), py::arg("parents"), py::arg("keys"), py::arg("values"),
           py::arg("capacity"), py::arg("layer_stride"), py::arg("prefix"), py::arg("scoring"));
}

}  // namespace swiftspec::binding
