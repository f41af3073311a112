// The inner part of a round.
#include "host/decoder/rounds.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bind/cache.h"
#include "bind/module.h"
#include "host/decoder/tree.h"

namespace swiftspec::binding {

namespace {

using host::Nodes;
using host::Rounds;
using host::Scoring;
using host::Tree;

std::unique_ptr<Rounds> make_rounds(host::Decoder& decoder, const Cache& cache) {
  const host::Stack& stack = decoder.stack();
  check(cache.sequences == 1, "rounds are of the only sequence of a cache");
  check(cache.type == model_type(stack.wide) && cache.layers == decoder.layers() && cache.kv_heads == stack.kv_heads &&
            cache.head_dim == stack.dim,
        "the cache does not fit the model");
  return std::make_unique<Rounds>(decoder,
                                  host::Region{cache.keys, cache.values, cache.capacity, cache.layer_bytes()});
}

// bias [vocab], of which the columns of this rank are read
std::unique_ptr<Scoring> make_scoring(const Rounds& rounds, int64_t vocab, double temperature, const MaybeArray& bias,
                                      bool noisy, uint64_t seed, uint32_t stream) {
  size_arg("vocab", vocab, 1);
  check(temperature > 0, "temperature must be above 0");
  const host::Columns columns = rounds.columns(vocab);
  const auto* all = at_or_null<float>(bias, kCpu, "bias", {vocab});
  return std::make_unique<Scoring>(columns, temperature, all == nullptr ? nullptr : all + columns.first, noisy, seed,
                                   stream);
}

// Whether the region has room for `rows` slots after the prefix, and the scoring is this decoder's.
void check_room(const Rounds& rounds, int64_t prefix, int64_t rows, const Scoring& scoring) {
  const host::Stack& stack = rounds.decoder().stack();
  check(prefix >= 0 && prefix + rows <= rounds.region().capacity, "the rows do not fit the cache");
  check(prefix + rows <= stack.positions, "a position lies outside the context");
  check(scoring.columns().count <= stack.head->n, "the scoring is another decoder's");
}

// bits [rows, bytes] uint8 of so many rows
host::Allowed allowed_from(const MaybeArray& bits, int64_t rows, const Scoring& scoring) {
  if (!bits) return {};
  const int64_t bytes = (scoring.columns().vocab + 7) / 8;
  return {bits->at<uint8_t>(kCpu, "allowed", {rows, bytes}), bytes};
}

// leaves expanded, seconds of the forward
std::pair<int64_t, double> expand(Rounds& rounds, Tree& tree, int64_t prefix, const Nodes& pending, int64_t leaves,
                                  int64_t children, Scoring& scoring, bool coupled, double tau,
                                  const std::optional<py::function>& allowed) {
  const int64_t ahead = static_cast<int64_t>(pending.size()), vocab = rounds.decoder().stack().vocab;
  size_arg("leaves", leaves, 1);
  check(tau > 0, "tau must be above 0");
  check(children >= 1 && children <= scoring.columns().vocab, "as many children as a vocabulary has, at least one");
  check(tree.expanded() + leaves <= tree.slots && tree.count() + leaves * children <= tree.nodes, "the tree is full");
  check(ahead == 0 || tree.expanded() == 0, "pending tokens go before the root");
  check_inside(pending.data(), ahead, vocab, "a token lies outside the vocabulary");
  check_inside(tree.token, tree.count(), vocab, "a token lies outside the vocabulary");
  check_room(rounds, prefix, ahead + tree.expanded() + leaves, scoring);
  py::object bits;  // alive until they have been read
  const host::AllowedAfter after = [&](const Nodes& nodes) {
    const py::gil_scoped_acquire locked;
    bits = (*allowed)(nodes);
    return allowed_from(bits.cast<Array>(), static_cast<int64_t>(nodes.size()), scoring);
  };
  const py::gil_scoped_release unlocked;
  const int64_t count = rounds.expand(tree, prefix, pending, leaves, children, scoring, coupled, tau,
                                      allowed ? after : host::AllowedAfter{});
  return {count, count == 0 ? 0.0 : rounds.seconds()};
}

// Whether these are the nodes of a proposal.
void check_nodes(const Rounds& rounds, const Nodes& tokens, const Nodes& parents) {
  const auto count = static_cast<int64_t>(tokens.size());
  size_arg("nodes", count, 1);
  check(parents.size() == tokens.size() && parents[0] == -1, "every node but the root has a parent");
  for (int64_t i = 1; i < count; ++i) {
    const int64_t parent = parents[static_cast<size_t>(i)];
    check(parent >= 0 && parent < i, "the nodes are not in topological order");
  }
  check_inside(tokens.data(), count, rounds.decoder().stack().vocab, "a token lies outside the vocabulary");
}

// path, sampled tokens, seconds of the forward
std::tuple<Nodes, Nodes, double> verify(Rounds& rounds, const Nodes& tokens, const Nodes& parents, int64_t prefix,
                                        Scoring& scoring, const MaybeArray& allowed) {
  const auto count = static_cast<int64_t>(tokens.size());
  check_nodes(rounds, tokens, parents);
  check_room(rounds, prefix, count, scoring);
  const host::Allowed follow = allowed_from(allowed, count, scoring);
  Nodes path, sampled;
  {
    py::gil_scoped_release unlocked;
    rounds.verify(tokens, parents, prefix, scoring, follow, path, sampled);
  }
  return {std::move(path), std::move(sampled), rounds.seconds()};
}

std::vector<float> probabilities(Rounds& rounds, const Nodes& tokens, const Nodes& parents, const Scoring& scoring) {
  check_nodes(rounds, tokens, parents);
  check(rounds.columns(scoring.columns().vocab).count == scoring.columns().vocab, "a rank of a group has no whole rows");
  check_inside(tokens.data(), static_cast<int64_t>(tokens.size()), scoring.columns().vocab,
               "a token lies outside the vocabulary");
  return rounds.probabilities(tokens, parents, scoring);
}

}  // namespace

void bind_rounds(py::module_& m) {
  py::class_<Scoring>(m, "Scoring", "What makes tokens of one request's logits; `Rounds.scoring` makes it.");
  py::class_<Rounds>(m, "Rounds",
                     "Expansions and verifications as one call each, of one decoder over the only sequence of a cache; "
                     "see host/decoder/rounds.h. The ranks of a group make the same calls and exchange the best of "
                     "theirs; OSError says that one of them is gone.")
      .def(py::init(&make_rounds), py::arg("decoder"), py::arg("cache"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def("scoring", &make_scoring, py::arg("vocab"), py::arg("temperature"), py::arg("bias"), py::arg("noisy"),
           py::arg("seed"), py::arg("stream"), py::keep_alive<0, 1>(), py::keep_alive<0, 4>(),
           "`bias` [vocab] float32; if `noisy`, the noise is that of `seed` and `stream`.")
      .def("expand", &expand, py::arg("tree"), py::arg("prefix"), py::arg("pending"), py::arg("leaves"),
           py::arg("children"), py::arg("scoring"), py::arg("coupled"), py::arg("tau"), py::arg("allowed"),
           "Expands the likeliest leaves. `prefix`: verified tokens with KV; `pending`: those without, before a root "
           "that is all there is. `allowed`: of the nodes of these leaves, a bit for each token that may follow, "
           "uint8 [leaves, bytes]; None: any. Returns how many leaves, and the seconds of the forward.")
      .def("verify", &verify, py::arg("tokens"), py::arg("parents"), py::arg("prefix"), py::arg("scoring"),
           py::arg("allowed"),
           "`allowed`: as in `expand`, [nodes, bytes]. The accepted path, whose slots now follow the prefix, the token drawn after each of its nodes, and the "
           "seconds of the forward.")
      .def("probabilities", &probabilities, py::arg("tokens"), py::arg("parents"), py::arg("scoring"),
           "Of the tokens of the proposal verified last, but for its root: what the target's logits give each after its "
           "parent. ValueError where a larger one was asked of than was verified.");
}

}  // namespace swiftspec::binding
