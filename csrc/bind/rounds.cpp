// Phases of a round as one call each.
#include "host/decoder/rounds.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bind/decoder_cache.h"
#include "bind/module.h"
#include "bind/sampling_args.h"
#include "host/decoder/tree.h"

namespace swiftspec::binding {

namespace {

using host::Nodes;
using host::Rounds;
using host::Scoring;
using host::Tree;

std::unique_ptr<Rounds> make_rounds(host::Decoder& decoder, const ModelCache& cache) {
  check(cache.sequences() <= 2, "the cache must have one sequence, or two for guided requests");
  check_cache(decoder, cache);
  return std::make_unique<Rounds>(decoder, cache);
}

// `bias` [vocab]; the columns of this rank are read.
std::unique_ptr<Scoring> make_scoring(const Rounds& rounds, int64_t vocab, double temperature, const MaybeArray& bias,
                                      bool noisy, uint64_t seed, uint32_t stream) {
  size_arg("vocab", vocab, 1);
  check(temperature > 0, "temperature must be above 0");
  const host::VocabShard columns = rounds.columns(vocab);
  const auto* all = at_or_null<float>(bias, kCpu, "bias", {vocab});
  return std::make_unique<Scoring>(columns, temperature, all == nullptr ? nullptr : all + columns.first, noisy, seed,
                                   stream);
}

// Checks tokens of a request: inside the vocabulary of the scoring.
void check_vocab(const Nodes& tokens, const Scoring& scoring) {
  check_range(tokens.data(), static_cast<int64_t>(tokens.size()), scoring.columns().vocab,
              "a token lies outside the vocabulary");
}

void set_penalties(Scoring& scoring, const py::dict& penalties, const Nodes& prompt, const Nodes& output) {
  check_vocab(prompt, scoring);
  check_vocab(output, scoring);
  scoring.penalties.emplace(scoring.columns().vocab, penalty_args(penalties), prompt, output);
}

void set_filters(Scoring& scoring, const py::dict& filters) {
  check(scoring.noisy(), "filters need noise");
  scoring.filter = filter_args(filters);
}

// `out` [nodes, outputs of the head].
void copy_logits(const Rounds& rounds, const Nodes& nodes, const Array& out) {
  const auto count = static_cast<int64_t>(nodes.size());
  for (const int64_t node : nodes) check(node >= 0, "a node is negative");
  rounds.copy_logits(nodes, out.at<float>(kCpu, "out", {count, rounds.decoder().model().head->n}));
}

// Checks that `rows` slots after the prefix fit the region, and that `scoring` fits the decoder.
void check_room(const Rounds& rounds, int64_t prefix, int64_t rows, const Scoring& scoring) {
  const host::PackedModel& model = rounds.decoder().model();
  check(prefix >= 0 && prefix + rows <= rounds.cache().capacity(), "the rows do not fit the cache");
  check(prefix + rows <= model.positions, "a position lies outside the context");
  check(scoring.columns().count <= model.head->n, "the scoring belongs to another decoder");
}

// `bits`: uint8 [rows, bytes] or none.
host::TokenMask allowed_from(const MaybeArray& bits, int64_t rows, const Scoring& scoring) {
  if (!bits) return {};
  const int64_t bytes = (scoring.columns().vocab + 7) / 8;
  return {bits->at<uint8_t>(kCpu, "allowed", {rows, bytes}), bytes};
}

// Returns the number of expanded leaves and the seconds of the forward.
std::pair<int64_t, double> expand(Rounds& rounds, Tree& tree, int64_t prefix, const Nodes& pending, int64_t leaves,
                                  int64_t children, Scoring& scoring, bool coupled, double tau,
                                  const std::optional<py::function>& allowed) {
  const int64_t num_pending = static_cast<int64_t>(pending.size()), vocab = rounds.decoder().model().vocab;
  size_arg("leaves", leaves, 1);
  check(tau > 0, "tau must be above 0");
  check(children >= 1 && children <= scoring.columns().vocab,
        "the number of children must be between 1 and the vocabulary size");
  check(tree.expanded() + leaves <= tree.slots && tree.count() + leaves * children <= tree.nodes, "the tree is full");
  check(num_pending == 0 || tree.expanded() == 0, "pending tokens need a tree without expansions");
  check_range(pending.data(), num_pending, vocab, "a token lies outside the vocabulary");
  check_range(tree.token, tree.count(), vocab, "a token lies outside the vocabulary");
  check_room(rounds, prefix, num_pending + tree.expanded() + leaves, scoring);
  py::object bits;  // kept alive until the masks have been read
  const host::TokenMaskFn after = [&](const Nodes& nodes) {
    const py::gil_scoped_acquire locked;
    bits = (*allowed)(nodes);
    return allowed_from(bits.cast<Array>(), static_cast<int64_t>(nodes.size()), scoring);
  };
  const py::gil_scoped_release unlocked;
  const int64_t count = rounds.expand(tree, prefix, pending, leaves, children, scoring, coupled, tau,
                                      allowed ? after : host::TokenMaskFn{});
  return {count, count == 0 ? 0.0 : rounds.seconds()};
}

// Checks that these are the nodes of a proposal.
void check_nodes(const Rounds& rounds, const Nodes& tokens, const Nodes& parents) {
  const auto count = static_cast<int64_t>(tokens.size());
  size_arg("nodes", count, 1);
  check(parents.size() == tokens.size() && parents[0] == -1, "every node but the root has a parent");
  for (int64_t i = 1; i < count; ++i) {
    const int64_t parent = parents[static_cast<size_t>(i)];
    check(parent >= 0 && parent < i, "the nodes are not in topological order");
  }
  check_range(tokens.data(), count, rounds.decoder().model().vocab, "a token lies outside the vocabulary");
}

// Checks that `path` descends from the root of a proposal.
void check_path(const Nodes& path, const Nodes& parents) {
  check(!path.empty() && path[0] == 0, "a path begins at the root");
  for (size_t i = 1; i < path.size(); ++i) {
    check(path[i] > 0 && path[i] < static_cast<int64_t>(parents.size()) &&
              parents[static_cast<size_t>(path[i])] == path[i - 1],
          "a node of the path is not a child of the node before it");
  }
}

// Returns the path, the sampled tokens and the seconds of the forward.
std::tuple<Nodes, Nodes, double> verify(Rounds& rounds, const Nodes& tokens, const Nodes& parents, int64_t prefix,
                                        Scoring& scoring, const MaybeArray& allowed,
                                        const std::optional<std::tuple<int64_t, int64_t, float>>& guidance,
                                        const std::optional<Nodes>& forced) {
  const auto count = static_cast<int64_t>(tokens.size());
  check_nodes(rounds, tokens, parents);
  if (forced) check_path(*forced, parents);
  if (scoring.penalties) check_vocab(tokens, scoring);
  check_room(rounds, prefix, count, scoring);
  std::optional<host::Guidance> guided;
  if (guidance) {
    guided = std::make_from_tuple<host::Guidance>(*guidance);
    check(rounds.cache().sequences() == 2, "guidance needs a cache of two sequences");
    check_room(rounds, guided->prefix, count, scoring);
    check_range(&guided->root, 1, rounds.decoder().model().vocab, "a token lies outside the vocabulary");
  }
  const host::TokenMask follow = allowed_from(allowed, count, scoring);
  Nodes path, sampled;
  {
    py::gil_scoped_release unlocked;
    rounds.verify(tokens, parents, prefix, guided, scoring, follow, forced, path, sampled);
  }
  return {std::move(path), std::move(sampled), rounds.seconds()};
}

std::vector<float> probabilities(Rounds& rounds, const Nodes& tokens, const Nodes& parents, const Scoring& scoring) {
  check_nodes(rounds, tokens, parents);
  check(rounds.columns(scoring.columns().vocab).count == scoring.columns().vocab,
        "a rank of a group has only a part of the logits");
  check_range(tokens.data(), static_cast<int64_t>(tokens.size()), scoring.columns().vocab,
              "a token lies outside the vocabulary");
  return rounds.probabilities(tokens, parents, scoring);
}

}  // namespace

void bind_rounds(py::module_& m) {
  py::class_<Scoring>(m, "Scoring",
                      "Scores of one request's logits: temperature, bias, penalties, filters and noise. Created by "
                      "`Rounds.scoring`.")
      .def("set_penalties", &set_penalties, py::arg("penalties"), py::arg("prompt"), py::arg("output"),
           "Penalties of verifications, by their names in SamplingParams. `prompt`, `output`: the verified tokens; "
           "those of later verifications are added by `Rounds.verify`.")
      .def("set_filters", &set_filters, py::arg("filters"),
           "Filters of verifications, by their names in SamplingParams.");
  py::class_<Rounds>(m, "Rounds",
                     "Expansions and verifications as one call each, for one decoder and a cache of one sequence, or of "
                     "two for verifications of guided requests; see "
                     "host/decoder/rounds.h. The ranks of a group make the same calls and merge their best tokens. "
                     "Raises OSError if a rank is lost.")
      .def(py::init(&make_rounds), py::arg("decoder"), py::arg("cache"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def("scoring", &make_scoring, py::arg("vocab"), py::arg("temperature"), py::arg("bias"), py::arg("noisy"),
           py::arg("seed"), py::arg("stream"), py::keep_alive<0, 1>(), py::keep_alive<0, 4>(),
           "`bias`: [vocab] float32. `noisy`: add the noise of `seed` and `stream`.")
      .def("expand", &expand, py::arg("tree"), py::arg("prefix"), py::arg("pending"), py::arg("leaves"),
           py::arg("children"), py::arg("scoring"), py::arg("coupled"), py::arg("tau"), py::arg("allowed"),
           "Expands the likeliest leaves. `prefix`: number of verified tokens with KV. `pending`: verified tokens "
           "without KV, only before the first expansion. `allowed`: maps the leaves to their token masks, uint8 "
           "[leaves, bytes], one bit per token; None allows all. Returns the number of expanded leaves and the "
           "seconds of the forward.")
      .def("verify", &verify, py::arg("tokens"), py::arg("parents"), py::arg("prefix"), py::arg("scoring"),
           py::arg("allowed"), py::arg("guidance"), py::arg("forced") = py::none(),
           "Verifies a proposal. `allowed`: token masks of the nodes, uint8 [nodes, bytes], or None. `guidance`: root "
           "token, prefix and scale of the unconditional sequence of a guided request, or None. `forced`: the path "
           "to accept whatever is drawn, root first; None: the path of the drawn tokens. Returns the accepted path, "
           "whose KV now follows the prefix, the token drawn after each of its nodes (in a forced path only the last "
           "one; before it the nodes' own tokens), and the seconds of the forward.")
      .def("probabilities", &probabilities, py::arg("tokens"), py::arg("parents"), py::arg("scoring"),
           "Target probabilities of each node's token after its parent, root excluded, for the proposal that was "
           "verified last. Raises ValueError if it had fewer nodes.")
      .def("logits", &copy_logits, py::arg("nodes"), py::arg("out"),
           "Copies the raw logits of these nodes of the proposal that was verified last to `out` [nodes, outputs of "
           "the head]. Raises ValueError if it had fewer nodes.");
}

}  // namespace swiftspec::binding
