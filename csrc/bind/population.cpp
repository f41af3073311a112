// Rounds of particles as one call.
#include "host/decoder/population.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/decoder_cache.h"
#include "bind/module.h"
#include "bind/sampling_args.h"

namespace swiftspec::binding {

namespace {

using host::Particles;
using host::Population;
using MaybeDict = std::optional<py::dict>;
// groups, temperature, bias, filters, penalties, min_tokens
using SpanArgs = std::vector<std::tuple<int64_t, double, MaybeArray, MaybeDict, MaybeDict, int64_t>>;

host::ModelWithCache side_of(host::Decoder& decoder, const ModelCache& cache) {
  const host::PackedModel& model = decoder.model();
  check(model.group == nullptr, "a rank of a group has only a part of the logits");
  check_cache(decoder, cache);
  return {decoder, cache};
}

// In the order of GroupRound.tensors (swiftspec/smc/round.py).
Particles particles_of(const std::vector<Array>& tensors) {
  check(tensors.size() == 18, "expected the 18 tensors of particles");
  const Array &mask = tensors[0], &path = tensors[2], &resampling = tensors[12], &stops = tensors[15];
  Particles p{};
  p.groups = mask.size(0), p.count = mask.size(1), p.slots = mask.size(2), p.vocab = stops.size(1);
  const int64_t g = p.groups, n = p.count;
  p.max_tokens = path.size(2) - Particles::kHeaderWords;
  check(p.max_tokens > 0, "paths do not fit the rows");
  p.mask = mask.at<bool>(kCpu, "mask", {g, n, p.slots});
  p.ends = tensors[1].at<bool>(kCpu, "ends", {g, n, 2});
  p.path = path.at<int64_t>(kCpu, "path", {g, n, kAny});
  p.base = tensors[3].at<int64_t>(kCpu, "base", {g});
  p.clock = tensors[4].at<int64_t>(kCpu, "clock", {g});
  p.limit = tensors[5].at<int64_t>(kCpu, "limit", {g});
  p.log_weights = tensors[6].at<double>(kCpu, "log_weights", {g, n});
  p.log_z = tensors[7].at<double>(kCpu, "log_z", {g});
  p.ess = tensors[8].at<double>(kCpu, "ess", {g});
  p.resampled = tensors[9].at<int64_t>(kCpu, "resampled", {g});
  p.rounds = tensors[10].at<int64_t>(kCpu, "rounds", {g});
  p.keys = tensors[11].at<uint32_t>(kCpu, "keys", {g, Particles::kPurposes, n});
  p.max_rounds = resampling.size(1);
  p.resampling = resampling.at<double>(kCpu, "resampling", {g, p.max_rounds});
  p.prefix = tensors[13].at<int64_t>(kCpu, "prefix", {g});
  p.sequences = tensors[14].at<int64_t>(kCpu, "sequences", {g});
  p.stops = stops.at<bool>(kCpu, "stops", {g, p.vocab});
  p.prompts = tensors[16].at<bool>(kCpu, "prompts", {g, p.vocab});
  p.suppressed = tensors[17].at<bool>(kCpu, "suppressed", {g, p.vocab});
  return p;
}

std::unique_ptr<Population> make_population(host::Decoder& draft, const ModelCache& draft_cache, host::Decoder& target,
                                            const ModelCache& target_cache, const std::vector<Array>& tensors,
                                            int64_t steps, double power, double threshold, bool deferred_bonus) {
  check(draft_cache.sequences() == target_cache.sequences(), "both caches must have the same number of sequences");
  Particles p = particles_of(tensors);
  p.steps = size_arg("steps", steps, 1);
  check(p.max_tokens > steps, "a path is too short for a round");
  check(power > 0, "power must be above 0");
  for (const host::Decoder* decoder : {&draft, &target}) {
    const host::PackedModel& model = decoder->model();
    check(p.vocab <= model.vocab && p.vocab <= model.head->n, "a model is smaller than the vocabulary");
  }
  return std::make_unique<Population>(side_of(draft, draft_cache), side_of(target, target_cache), p,
                                      power, threshold, deferred_bonus);
}

// Whether a round of this group stays within its tensors and both caches.
void check_group(const Population& population, int64_t group, int64_t sequences) {
  const Particles& p = population.particles();
  check(p.base[group] >= 1 && p.width(group) <= p.slots, "the tree's region is full");
  check_range(p.sequences + group, 1, sequences, "a sequence is out of range");
  check(p.rounds[group] >= 0 && p.rounds[group] < p.max_rounds - 1, "more rounds than resampling numbers");
  int64_t furthest = 0;
  for (int64_t i = 0; i < p.count; ++i) {
    const host::Particle row = p.row(group, i);
    check(*row.length >= 0 && *row.length + p.steps < p.max_tokens, "a path is full");
    check_range(row.tokens, *row.length, p.vocab, "a token lies outside the vocabulary");
    check_range(row.tail_tokens, 2, p.vocab, "a token lies outside the vocabulary");
    if (*row.finished == 0) check_range(row.tail_slots, 2, p.base[group], "a slot is not in use");
    check(row.tail_positions[0] >= 0 && row.tail_positions[1] >= 0, "a position is negative");
    furthest = std::max({furthest, row.tail_positions[0], row.tail_positions[1]});
  }
  for (const bool target : {false, true}) {
    const host::ModelWithCache& side = population.side(target);
    check(p.prefix[group] >= 0 && p.prefix[group] + p.width(group) <= side.cache.capacity(), "the rows do not fit the cache");
    check(furthest + p.steps < side.decoder.model().positions, "a position lies outside the context");
  }
}

host::Span span_of(const SpanArgs::value_type& args, int64_t vocab) {
  const auto& [count, temperature, bias, filters, penalties, min_tokens] = args;
  check(count >= 1 && temperature > 0 && min_tokens >= 0,
        "a span needs at least one group, a temperature above 0 and a min_tokens of at least 0");
  host::Span span{count, temperature, at_or_null<float>(bias, kCpu, "bias", {vocab}), {}, {}, min_tokens};
  if (filters) span.filter = filter_args(*filters);
  if (penalties) span.penalties = penalty_args(*penalties);
  return span;
}

// Returns the seconds of the draft's forwards and of the target's.
std::pair<double, double> round(Population& population, const SpanArgs& spans, const Array& head,
                                const std::optional<py::function>& on_forward) {
  const Particles& p = population.particles();
  const host::ModelWithCache &draft = population.side(false), &target = population.side(true);
  std::vector<host::Span> alike;
  int64_t groups = 0;
  for (const auto& args : spans) {
    alike.push_back(span_of(args, p.vocab));
    groups += alike.back().groups;
  }
  check(groups >= 1 && groups <= p.groups, "as many groups as there are, and at least one");
  const int64_t sequences = std::min(draft.cache.sequences(), target.cache.sequences());
  for (int64_t group = 0; group < groups; ++group) check_group(population, group, sequences);
  auto* out = head.at<int64_t>(kCpu, "head", {groups, kAny});
  const int64_t width = head.size(1) - 2 - p.max_tokens;
  check(width >= 0 && width <= p.slots, "summary does not fit the tree slots");
  std::pair<double, double> spent{0.0, 0.0};
  const py::gil_scoped_release unlocked;
  population.round(alike, out, width, [&](bool of_target, int64_t rows, double seconds) {
    (of_target ? spent.second : spent.first) += seconds;
    if (!on_forward) return;
    const py::gil_scoped_acquire locked;
    (*on_forward)(of_target, rows, seconds);
  });
  return spent;
}

void compact(Population& population, int64_t group, int64_t promoted, const host::Nodes& surviving) {
  const Particles& p = population.particles();
  check(group >= 0 && group < p.groups && promoted >= 0, "a group is out of range");
  check(p.base[group] <= p.slots, "more slots in use than the region has");
  for (size_t i = 0; i < surviving.size(); ++i) {
    check(surviving[i] < p.base[group] && (i == 0 ? surviving[0] >= 0 : surviving[i] > surviving[i - 1]),
          "slots in use, ascending");
  }
  for (int64_t i = 0; i < p.count; ++i) {
    check_range(p.row(group, i).tail_slots, 2, p.slots, "a slot is outside the region");
  }
  p.compact(group, promoted, surviving);
}

}  // namespace

void bind_population(py::module_& m) {
  py::class_<Population>(m, "Population",
                         "Rounds of particles as one call each. Works on both models and in place on the tensors; see "
                         "host/decoder/population.h.")
      .def(py::init(&make_population), py::arg("draft"), py::arg("draft_cache"), py::arg("target"),
           py::arg("target_cache"), py::arg("tensors"), py::arg("steps"), py::arg("power"), py::arg("threshold"),
           py::arg("deferred_bonus"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(),
           "`tensors`: those of GroupRound.tensors. Keeps all arguments alive.")
      .def("round", &round, py::arg("spans"), py::arg("summary"), py::arg("on_forward"),
           "Runs a round of the first groups. Each span is (groups, temperature, bias [vocab] or None, filters or None, "
           "penalties or None, min_tokens), filters and penalties by their names in SamplingParams. Fills `summary` "
           "[groups, 2 + max_tokens + width] as GroupRound does. Calls on_forward(is_target, rows, seconds) after "
           "each forward. Returns the seconds of the draft's forwards and of the target's.")
      .def("compact", &compact, py::arg("group"), py::arg("promoted"), py::arg("surviving"),
           "Follows a compaction of both caches: the first `promoted` slots joined the prefix, slots `surviving` are "
           "kept.");
}

}  // namespace swiftspec::binding
