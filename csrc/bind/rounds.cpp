// Phases of a round as one call each.
#include "host/decoder/rounds.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

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

void observe(Scoring& scoring, const Nodes& tokens) {
  check_vocab(tokens, scoring);
  if (scoring.penalties) scoring.penalties->observe(tokens);
}

void set_filters(Scoring& scoring, const py::dict& filters) {
  check(scoring.noisy(), "filters need noise");
  scoring.filter = filter_args(filters);
}

// `out` [rows, outputs of the head].
void copy_logits(const Rounds& rounds, const Nodes& rows, const Array& out) {
  const auto count = static_cast<int64_t>(rows.size());
  for (const int64_t row : rows) check(row >= 0, "a row is negative");
  rounds.copy_logits(rows, out.at<float>(kCpu, "out", {count, rounds.decoder().model().head->n}));
}

// Checks that `rows` slots after the prefix fit the region of a sequence, and that `scoring` fits the decoder.
void check_room(const Rounds& rounds, int64_t sequence, int64_t prefix, int64_t rows, const Scoring& scoring) {
  const host::PackedModel& model = rounds.decoder().model();
  check(sequence >= 0 && sequence < rounds.cache().sequences(), "the cache does not have this sequence");
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

// Checks that no sequence is in a call twice.
void check_distinct(Nodes sequences) {
  std::sort(sequences.begin(), sequences.end());
  const bool repeated = std::adjacent_find(sequences.begin(), sequences.end()) != sequences.end();
  check(!repeated, "two requests have the same sequence");
}

void check_expansion(const Rounds& rounds, const host::Expansion& each) {
  const Tree& tree = *each.tree;
  const int64_t num_pending = static_cast<int64_t>(each.pending.size()), vocab = rounds.decoder().model().vocab;
  size_arg("leaves", each.leaves, 1);
  check(each.tau > 0, "tau must be above 0");
  check(each.children >= 1 && each.children <= each.scoring->columns().vocab,
        "the number of children must be between 1 and the vocabulary size");
  check(tree.expanded() + each.leaves <= tree.slots && tree.count() + each.leaves * each.children <= tree.nodes,
        "the tree is full");
  check(num_pending == 0 || tree.expanded() == 0, "pending tokens need a tree without expansions");
  check_range(each.pending.data(), num_pending, vocab, "a token lies outside the vocabulary");
  check_range(tree.token, tree.count(), vocab, "a token lies outside the vocabulary");
  check_room(rounds, each.sequence, each.prefix, num_pending + tree.expanded() + each.leaves, *each.scoring);
}

// key, leaves, exponent, tokens, probs
using SampledArgs = std::tuple<uint32_t, int64_t, double, Array, Array>;

host::SampledChildren sampled_from(const SampledArgs& args, const Tree& tree, int64_t vocab) {
  const auto& [key, leaves, exponent, tokens, probs] = args;
  const int64_t slots = tokens.size(0), width = tokens.size(1);
  check(slots >= tree.slots && width >= 1 && width <= vocab, "the distributions do not fit the tree");
  check(leaves >= 0, "the number of leaves is negative");
  return {key,   leaves, exponent, slots, width, tokens.at<int32_t>(kCpu, "tokens", {slots, width}),
          probs.at<float>(kCpu, "probs", {slots, width})};
}

// tree, sequence, prefix, pending, leaves, children, scoring, coupled, tau, allowed, sampled
using ExpandArgs = std::tuple<Tree*, int64_t, int64_t, Nodes, int64_t, int64_t, Scoring*, bool, double,
                              std::optional<py::function>, std::optional<SampledArgs>>;

// Returns the numbers of expanded leaves and the seconds of the forward.
std::pair<Nodes, double> expand(Rounds& rounds, const std::vector<ExpandArgs>& args) {
  std::vector<host::Expansion> expansions;
  std::vector<py::object> bits(args.size());  // kept alive until the masks have been read
  Nodes sequences;
  for (const auto& [tree, sequence, prefix, pending, leaves, children, scoring, coupled, tau, allowed, sampled] : args) {
    check(tree != nullptr && scoring != nullptr, "an expansion needs a tree and a scoring");
    host::Expansion& each = expansions.emplace_back(
        host::Expansion{tree, sequence, prefix, pending, leaves, children, scoring, coupled, tau});
    check_expansion(rounds, each);
    sequences.push_back(sequence);
    if (sampled) each.sampled = sampled_from(*sampled, *tree, scoring->columns().vocab);
    if (!allowed) continue;
    each.allowed = [&masks = bits[expansions.size() - 1], &make = *allowed, scoring](const Nodes& nodes) {
      const py::gil_scoped_acquire locked;
      masks = make(nodes);
      return allowed_from(masks.cast<Array>(), static_cast<int64_t>(nodes.size()), *scoring);
    };
  }
  check_distinct(std::move(sequences));
  {
    const py::gil_scoped_release unlocked;
    rounds.expand(expansions);
  }
  Nodes counts;
  for (const host::Expansion& each : expansions) counts.push_back(static_cast<int64_t>(each.expanded.size()));
  const bool idle = std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count == 0; });
  return {std::move(counts), idle ? 0.0 : rounds.seconds()};
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

void check_verification(const Rounds& rounds, const host::Verification& each) {
  const auto count = static_cast<int64_t>(each.tokens.size());
  check_nodes(rounds, each.tokens, each.parents);
  if (each.forced) check_path(*each.forced, each.parents);
  if (each.scoring->penalties) check_vocab(each.tokens, *each.scoring);
  check_room(rounds, each.sequence, each.prefix, count, *each.scoring);
  if (!each.guidance) return;
  check_room(rounds, each.guidance->sequence, each.guidance->prefix, count, *each.scoring);
  check_range(&each.guidance->root, 1, rounds.decoder().model().vocab, "a token lies outside the vocabulary");
}

// The draft distributions of the nodes that have children: tokens, probs
using DraftedArgs = std::tuple<Array, Array>;

// Checks that the token of each child has a probability in the distribution of its parent.
host::DraftProbs drafted_from(const DraftedArgs& args, const host::Verification& of) {
  const auto& [tokens, probs] = args;
  const auto count = of.tokens.size();
  host::DraftProbs drafted{tokens.size(1), nullptr, nullptr, Nodes(count, -1), std::vector<Nodes>(count), Nodes(count)};
  for (size_t node = 1; node < count; ++node) {
    drafted.children[static_cast<size_t>(of.parents[node])].push_back(static_cast<int64_t>(node));
  }
  int64_t distributions = 0;
  for (size_t node = 0; node < count; ++node) {
    if (!drafted.children[node].empty()) drafted.rows[node] = distributions++;
  }
  drafted.tokens = tokens.at<int32_t>(kCpu, "tokens", {distributions, drafted.width});
  drafted.probs = probs.at<float>(kCpu, "probs", {distributions, drafted.width});
  for (int64_t i = 0; i < distributions * drafted.width; ++i) {
    check(drafted.tokens[i] >= 0 && drafted.tokens[i] < of.scoring->columns().vocab,
          "a token lies outside the vocabulary");
  }
  for (size_t node = 1; node < count; ++node) {
    const int64_t begin = drafted.rows[static_cast<size_t>(of.parents[node])] * drafted.width;
    int64_t found = 0;
    for (int64_t column = 0; column < drafted.width; ++column) {
      if (drafted.tokens[begin + column] != of.tokens[node] || !(drafted.probs[begin + column] > 0)) continue;
      drafted.columns[node] = column;
      ++found;
    }
    check(found == 1, "the token of a node does not match the draft distribution of its parent");
  }
  return drafted;
}

// tokens, parents, sequence, prefix, scoring, allowed, guidance, forced, drafted
using VerifyArgs = std::tuple<Nodes, Nodes, int64_t, int64_t, Scoring*, MaybeArray,
                              std::optional<std::tuple<int64_t, int64_t, int64_t, float>>, std::optional<Nodes>,
                              std::optional<DraftedArgs>>;
// path, sampled tokens, row of the root, overlaps
using Verdict = std::tuple<Nodes, Nodes, int64_t, std::vector<double>>;

// Returns the verdicts and the seconds of the forward.
std::pair<std::vector<Verdict>, double> verify(Rounds& rounds, const std::vector<VerifyArgs>& args) {
  check(!args.empty(), "nothing to verify");
  std::vector<host::Verification> verifications;
  Nodes sequences;
  for (const auto& [tokens, parents, sequence, prefix, scoring, allowed, guidance, forced, drafted] : args) {
    check(scoring != nullptr, "a verification needs a scoring");
    host::Verification& each =
        verifications.emplace_back(host::Verification{tokens, parents, sequence, prefix, scoring});
    each.allowed = allowed_from(allowed, static_cast<int64_t>(tokens.size()), *scoring);
    if (guidance) each.guidance = std::make_from_tuple<host::Guidance>(*guidance);
    each.forced = forced;
    check_verification(rounds, each);
    if (drafted) each.drafted = drafted_from(*drafted, each);
    sequences.push_back(sequence);
    if (each.guidance) sequences.push_back(each.guidance->sequence);
  }
  check_distinct(std::move(sequences));
  {
    const py::gil_scoped_release unlocked;
    rounds.verify(verifications);
  }
  std::vector<Verdict> verdicts;
  for (host::Verification& each : verifications) {
    verdicts.emplace_back(std::move(each.path), std::move(each.sampled), each.row, std::move(each.overlaps));
  }
  return {std::move(verdicts), rounds.seconds()};
}

std::vector<float> probabilities(Rounds& rounds, const Nodes& tokens, const Nodes& parents, const Scoring& scoring,
                                 int64_t row) {
  check_nodes(rounds, tokens, parents);
  check(row >= 0, "a row is negative");
  check(rounds.columns(scoring.columns().vocab).count == scoring.columns().vocab,
        "a rank of a group has only a part of the logits");
  check_range(tokens.data(), static_cast<int64_t>(tokens.size()), scoring.columns().vocab,
              "a token lies outside the vocabulary");
  return rounds.probabilities(tokens, parents, scoring, row);
}

}  // namespace

void bind_rounds(py::module_& m) {
  py::class_<Scoring>(m, "Scoring",
                      "Scores of one request's logits: temperature, bias, penalties, filters and noise. Created by "
                      "`Rounds.scoring`.")
      .def("set_penalties", &set_penalties, py::arg("penalties"), py::arg("prompt"), py::arg("output"),
           "Penalties of verifications and sampled children, by their names in SamplingParams. `prompt`, `output`: the "
           "verified tokens; those of later verifications are added by `Rounds.verify`.")
      .def("observe", &observe, py::arg("tokens"),
           "Adds verified output tokens to the counts of the penalties, if `Rounds.verify` has not drawn them.")
      .def("set_filters", &set_filters, py::arg("filters"),
           "Filters of verifications and sampled children, by their names in SamplingParams.");
  py::class_<Rounds>(m, "Rounds",
                     "Expansions and verifications of one request, or of several at a time, as one call each, for one "
                     "decoder and a cache; see host/decoder/rounds.h. The ranks of a group make the same calls and merge "
                     "their best tokens. Raises OSError if a rank is lost.")
      .def(py::init(&make_rounds), py::arg("decoder"), py::arg("cache"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>())
      .def("scoring", &make_scoring, py::arg("vocab"), py::arg("temperature"), py::arg("bias"), py::arg("noisy"),
           py::arg("seed"), py::arg("stream"), py::keep_alive<0, 1>(), py::keep_alive<0, 4>(),
           "`bias`: [vocab] float32. `noisy`: add the noise of `seed` and `stream`.")
      .def("expand", &expand, py::arg("expansions"),
           "Expands the likeliest leaves of trees. Each of `expansions`: tree; index of the sequence; prefix, the number "
           "of verified tokens with KV; pending, the verified tokens without KV, only before the first expansion; "
           "leaves; children of each; scoring; whether children are coupled; tau; allowed, which maps the leaves to their "
           "token masks, uint8 [leaves, bytes], one bit per token, or None for all; sampled, for children that are drawn "
           "without replacement, or None: key of the noise, number of leaves expanded so far, exponent of the weights, "
           "and by tree slot the tokens, int32 [slots, width], and probabilities, float32, of the distributions, which "
           "are written. Returns the numbers of expanded leaves and the seconds of the forward.")
      .def("verify", &verify, py::arg("verifications"),
           "Verifies proposals. Each of `verifications`: tokens; parents; index of the sequence; prefix; scoring; allowed, "
           "token masks of the nodes, uint8 [nodes, bytes], or None; guidance, index of the sequence, root token, prefix "
           "and scale of the unconditional sequence of a guided request, or None; forced, the path to accept whatever is "
           "drawn, root first, or None for the path of the drawn tokens; drafted, for rejection sampling, or None: tokens, "
           "int32 [nodes with children, width], and probabilities, float32, of the distributions that the children were "
           "drawn from. Returns for each the accepted path, whose KV now "
           "follows the prefix, the token drawn after each of its nodes (in a forced path only the last one; before it "
           "the nodes' own tokens), the row of its root in the logits, and with rejection sampling 1 - TV(p, q) for each "
           "node of the path that has children; and the seconds of the forward.")
      .def("probabilities", &probabilities, py::arg("tokens"), py::arg("parents"), py::arg("scoring"),
           py::arg("row"),
           "Target probabilities of each node's token after its parent, root excluded, for a proposal that was verified "
           "last. `row`: of its root. Raises ValueError if it had fewer nodes.")
      .def("logits", &copy_logits, py::arg("rows"), py::arg("out"),
           "Copies the raw logits of these rows of the last verification to `out` [rows, outputs of the head]. Raises "
           "ValueError if it had fewer rows.");
}

}  // namespace swiftspec::binding
