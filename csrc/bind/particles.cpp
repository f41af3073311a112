// Resampling of particles on the CPU as a separate operator; Population resamples within a round.
#include "host/decoder/particles.h"

#include <vector>

#include "bind/arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

using host::Particles;

void resample(const Array& log_weights, const Array& mask, const Array& ends, const Array& path, const Array& log_z,
              const Array& ess, const Array& resampled, const Array& rounds, const Array& uniform, double threshold,
              int64_t width) {
  Particles p{};
  p.groups = log_weights.size(0), p.count = log_weights.size(1), p.slots = mask.size(2);
  p.max_tokens = path.size(2) - Particles::kHeaderWords;
  check(p.count >= 1 && p.max_tokens >= 0, "a group needs at least one particle, and a path its header");
  check(width >= 0 && width <= p.slots, "the window is wider than the mask");
  const int64_t g = p.groups, n = p.count;
  std::vector<int64_t> in_use(static_cast<size_t>(g), width);
  p.log_weights = log_weights.at<double>(kCpu, "log_weights", {g, n});
  p.mask = mask.at<bool>(kCpu, "mask", {g, n, p.slots});
  p.ends = ends.at<bool>(kCpu, "ends", {g, n, 2});
  p.path = path.at<int64_t>(kCpu, "path", {g, n, kAny});
  p.base = in_use.data();
  p.log_z = log_z.at<double>(kCpu, "log_z", {g});
  p.ess = ess.at<double>(kCpu, "ess", {g});
  p.resampled = resampled.at<int64_t>(kCpu, "resampled", {g});
  p.rounds = rounds.at<int64_t>(kCpu, "rounds", {g});
  for (int64_t row = 0; row < g * n; ++row) {
    const int64_t length = p.path[row * (Particles::kHeaderWords + p.max_tokens)];
    check(length >= 0 && length <= p.max_tokens, "a path has more tokens than its capacity");
  }
  const double* numbers = uniform.at<double>(kCpu, "uniform", {g});
  for (int64_t group = 0; group < g; ++group) p.resample(group, threshold, numbers[group]);
}

}  // namespace

void bind_particles(py::module_& m) {
  m.def("resample", &resample, py::kw_only(), py::arg("log_weights"), py::arg("mask"), py::arg("ends"), py::arg("path"),
        py::arg("log_z"), py::arg("ess"), py::arg("resampled"), py::arg("rounds"), py::arg("uniform"),
        py::arg("threshold"), py::arg("width"),
        "Updates the statistics of particle groups and resamples those with a low effective sample size, in place; see "
        "host/decoder/particles.h.");
}

}  // namespace swiftspec::binding
