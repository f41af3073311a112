// Suffix lookup.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "bind/arguments.h"
#include "bind/module.h"
#include "host/decoder/suffix_index.h"

namespace swiftspec::binding {

namespace {

using host::SuffixIndex;
using Tokens = std::vector<int32_t>;
using Values = std::vector<float>;

void check_tokens(const Tokens& tokens) {
  for (const int32_t token : tokens) check(token >= 0, "a token is negative");
}

void append(SuffixIndex& index, const Tokens& tokens) {
  check_tokens(tokens);
  index.append(tokens);
}

std::tuple<Tokens, Tokens, Tokens, Values, Values> query(SuffixIndex& index, int64_t max_nodes, const Array& acceptance,
                                                         const Tokens& path) {
  size_arg("max_nodes", max_nodes, 1);
  check_tokens(path);
  host::Continuations found =
      index.query(path, max_nodes, acceptance.at<float>(kCpu, "acceptance", {SuffixIndex::kMaxLength + 1}));
  return {std::move(found.tokens), std::move(found.parents), std::move(found.lengths), std::move(found.shares),
          std::move(found.weights)};
}

std::unique_ptr<SuffixIndex> make_index(int64_t capacity) {
  constexpr int64_t kMaxCapacity = int64_t{1} << 28;
  check(size_arg("capacity", capacity, 1) <= kMaxCapacity, "capacity must be at most 2^28 tokens");
  return std::make_unique<SuffixIndex>(capacity);
}

}  // namespace

void bind_suffix(py::module_& m) {
  m.attr("MAX_MATCH_TOKENS") = SuffixIndex::kMaxLength;
  py::class_<SuffixIndex>(m, "SuffixIndex",
                          "Continuations of earlier occurrences of the latest tokens; see "
                          "host/decoder/suffix_index.h.")
      .def(py::init(&make_index), py::arg("capacity"),
           "An empty index. `capacity`: tokens of all texts, rounded up to a power of two; the oldest are evicted.")
      .def("begin_text", &SuffixIndex::begin_text, "Begins a text; no match crosses its border.")
      .def("append", &append, py::arg("tokens"), "Appends tokens to the latest text.")
      .def("query", &query, py::arg("max_nodes"), py::arg("acceptance"), py::arg("path") = Tokens{},
           "The likeliest continuations of the latest text followed by `path`: tokens, parents (0: the root, so the "
           "first node is 1), match lengths, shares and log-weights. `acceptance` [MAX_MATCH_TOKENS + 1]: probability "
           "that a continuation is right, by match length.");
}

}  // namespace swiftspec::binding
