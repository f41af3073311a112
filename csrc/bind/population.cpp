// A round of particles.
#include "host/decoder/population.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/cache.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

using host::Law;
using host::Particles;
using host::Population;
using SpanArgs = std::vector<std::tuple<int64_t, double, MaybeArray>>;  // groups, temperature, bias

host::Side side_of(host::Decoder& decoder, const Cache& cache) {
  const host::Stack& stack = decoder.stack();
  check(stack.group == nullptr, "a rank of a group has no whole logits");
  check(cache.type == model_type(stack.wide) && cache.layers == decoder.layers() && cache.kv_heads == stack.kv_heads &&
            cache.head_dim == stack.dim,
        "the cache does not fit the model");
  return {decoder, cache.keys, cache.values, cache.capacity, cache.layer_bytes(), cache.region_bytes()};
}

// In the order of SMCRound.tensors (swiftspec/smc/round.py).
Particles particles_of(const std::vector<Array>& tensors) {
  check(tensors.size() == 17, "expected the 17 tensors of a population");
  const Array &mask = tensors[0], &keys = tensors[11], &resampling = tensors[13], &stops = tensors[16];
  Particles p{};
  p.groups = mask.size(0), p.count = mask.size(1), p.slots = mask.size(2), p.vocab = stops.size(1);
  p.rounds_known = resampling.size(1), p.streams = keys.size(2);
  const int64_t g = p.groups, n = p.count;
  p.text = tensors[2].size(2) - Particles::kHead;
  check(p.streams >= n && p.text > 0, "keys or texts do not fit the particles");
  p.mask = mask.at<bool>(kCpu, "mask", {g, n, p.slots});
  p.ends = tensors[1].at<bool>(kCpu, "ends", {g, n, 2});
  p.path = tensors[2].at<int64_t>(kCpu, "path", {g, n, kAny});
  p.log_weights = tensors[3].at<double>(kCpu, "log_weights", {g, n});
  p.base = tensors[4].at<int64_t>(kCpu, "base", {g});
  p.clock = tensors[5].at<int64_t>(kCpu, "clock", {g});
  p.limit = tensors[6].at<int64_t>(kCpu, "limit", {g});
  p.log_z = tensors[7].at<double>(kCpu, "log_z", {g});
  p.ess = tensors[8].at<double>(kCpu, "ess", {g});
  p.resampled = tensors[9].at<int64_t>(kCpu, "resampled", {g});
  p.rounds = tensors[10].at<int64_t>(kCpu, "rounds", {g});
  p.keys = keys.at<uint32_t>(kCpu, "keys", {g, Particles::kPurposes, p.streams});
  p.target = tensors[12].at<uint32_t>(kCpu, "target", {g});
  p.resampling = resampling.at<double>(kCpu, "resampling", {g, p.rounds_known});
  p.prefix = tensors[14].at<int64_t>(kCpu, "prefix", {g});
  p.sequences = tensors[15].at<int64_t>(kCpu, "sequences", {g});
  p.stops = stops.at<bool>(kCpu, "stops", {g, p.vocab});
  return p;
}

Law law_of(const std::string& name) {
  check(name == "weigh" || name == "match" || name == "reject", "a law is weigh, match or reject");
  return name == "weigh" ? Law::weigh : name == "match" ? Law::match : Law::reject;
}

std::unique_ptr<Population> make_population(host::Decoder& draft, const Cache& draft_cache, host::Decoder& target,
                                            const Cache& target_cache, const std::vector<Array>& tensors,
                                            int64_t steps, const std::string& law, double power, double threshold,
                                            bool deferred_bonus) {
  check(draft_cache.sequences == target_cache.sequences, "the two caches have as many sequences");
  Particles p = particles_of(tensors);
  p.steps = size_arg("steps", steps, 1);
  check(p.text > steps, "a text has no room for a round");
  check(power > 0, "power must be above 0");
  for (const host::Decoder* decoder : {&draft, &target}) {
    const host::Stack& stack = decoder->stack();
    check(p.vocab <= stack.vocab && p.vocab <= stack.head->n, "a model is smaller than the vocabulary");
  }
  return std::make_unique<Population>(side_of(draft, draft_cache), side_of(target, target_cache), p, law_of(law), power,
                                      threshold, deferred_bonus);
}

// Whether a round of this group stays within its tensors and both caches.
void check_group(const Population& population, int64_t group, int64_t sequences) {
  const Particles& p = population.particles();
  check(p.base[group] >= 1 && p.width(group) <= p.slots, "the tree's region is full");
  check_inside(p.sequences + group, 1, sequences, "a sequence that the caches lack");
  check(p.rounds[group] >= 0 && p.rounds[group] < p.rounds_known - 1, "more rounds than tokens");
  int64_t furthest = 0;
  for (int64_t i = 0; i < p.count; ++i) {
    const host::Particle row = p.row(group, i);
    check(*row.length >= 0 && *row.length + p.steps < p.text, "a text is full");
    check_inside(row.tail_tokens, 2, p.vocab, "a token lies outside the vocabulary");
    check(*row.finished != 0 || (row.tail_slots[0] >= 0 && row.tail_slots[0] < p.base[group] && row.tail_slots[1] >= 0 &&
                                 row.tail_slots[1] < p.base[group]),
          "a slot lies outside the slots in use");
    check(row.tail_positions[0] >= 0 && row.tail_positions[1] >= 0, "a position lies before the text");
    furthest = std::max({furthest, row.tail_positions[0], row.tail_positions[1]});
  }
  for (const bool target : {false, true}) {
    const host::Side& side = population.side(target);
    check(p.prefix[group] >= 0 && p.prefix[group] + p.width(group) <= side.capacity, "the rows do not fit the cache");
    check(furthest + p.steps < side.decoder.stack().positions, "a position lies outside the context");
  }
}

// seconds of the draft's forwards, and of the target's
std::pair<double, double> round(Population& population, const SpanArgs& spans, const Array& head,
                                const std::optional<py::function>& told) {
  const Particles& p = population.particles();
  const host::Side &draft = population.side(false), &target = population.side(true);
  std::vector<host::Span> alike;
  int64_t groups = 0;
  for (const auto& [count, temperature, bias] : spans) {
    check(count >= 1 && temperature >= 0, "a span has groups, and a temperature");
    alike.push_back({count, temperature, at_or_null<float>(bias, kCpu, "bias", {p.vocab})});
    groups += count;
  }
  check(groups >= 1 && groups <= p.groups, "as many groups as there are, and at least one");
  const int64_t sequences = std::min(draft.layer_stride / draft.region_stride, target.layer_stride / target.region_stride);
  for (int64_t group = 0; group < groups; ++group) check_group(population, group, sequences);
  auto* out = head.at<int64_t>(kCpu, "head", {groups, kAny});
  const int64_t width = head.size(1) - 3 - p.text;
  check(width >= 0 && width <= p.slots, "head has no room for the columns, or for more than there are");
  std::pair<double, double> spent{0.0, 0.0};
  const py::gil_scoped_release unlocked;
  population.round(alike, out, width, [&](bool of_target, int64_t rows, double seconds) {
    (of_target ? spent.second : spent.first) += seconds;
    if (!told) return;
    const py::gil_scoped_acquire locked;
    (*told)(of_target, rows, seconds);
  });
  return spent;
}

void compact(Population& population, int64_t group, int64_t promoted, const host::Nodes& keep) {
  const Particles& p = population.particles();
  check(group >= 0 && group < p.groups && promoted >= 0, "a group that is not there");
  check(p.base[group] <= p.slots, "more slots than the region has");
  for (size_t i = 0; i < keep.size(); ++i) {
    check(keep[i] < p.base[group] && (i == 0 ? keep[0] >= 0 : keep[i] > keep[i - 1]), "slots in use, ascending");
  }
  for (int64_t i = 0; i < p.count; ++i) check_inside(p.row(group, i).tail_slots, 2, p.slots, "a slot outside the region");
  p.compact(group, promoted, keep);
}

}  // namespace

void bind_population(py::module_& m) {
  py::class_<Population>(m, "Population",
                         "Rounds of particles, or of exact chains, as one call each, on both models and on tensors that "
                         "stay where they are; see host/decoder/population.h.")
      .def(py::init(&make_population), py::arg("draft"), py::arg("draft_cache"), py::arg("target"),
           py::arg("target_cache"), py::arg("tensors"), py::arg("steps"), py::arg("law"), py::arg("power"),
           py::arg("threshold"), py::arg("deferred_bonus"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(),
           "`tensors`: those of SMCRound.tensors. `law`: weigh, match or reject. It keeps what it is given alive.")
      .def("round", &round, py::arg("spans"), py::arg("head"), py::arg("told"),
           "A round of the first groups, of which each span has so many whose logits go by one temperature (0: no noise) "
           "and bias [vocab]. Fills head [groups, 3 + text + width] as SMCRound does. After each forward "
           "`told`, if there is one, gets whether it was the target's, its rows and its seconds. Returns the seconds of "
           "the draft's forwards and of the target's.")
      .def("compact", &compact, py::arg("group"), py::arg("promoted"), py::arg("keep"),
           "Follows a compaction of both caches: of the slots so many have gone to the prefix, and `keep` stay.");
}

}  // namespace swiftspec::binding
