// Noise and sampling on the CPU.
#include <pybind11/stl.h>

#include "bind/arguments.h"
#include "bind/module.h"
#include "bind/sampling_args.h"
#include "common/noise.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

void noise_bits(uint64_t seed, uint32_t stream, const Array& positions, const Array& out) {
  const int64_t rows = positions.size(0), vocab = out.size(1);
  const auto* from = positions.at<int32_t>(kCpu, "positions", {kAny});
  auto* to = out.at<uint32_t>(kCpu, "out", {rows, kAny});
  py::gil_scoped_release unlocked;
  host::noise_bits(seed, stream, from, rows, vocab, to);
}

void gumbel_rows(uint64_t seed, uint32_t stream, const Array& positions, uint32_t first, const Array& out) {
  const int64_t rows = positions.size(0), count = out.size(1);
  const auto* from = positions.at<int32_t>(kCpu, "positions", {kAny});
  auto* to = out.at<float>(kCpu, "out", {rows, kAny});
  py::gil_scoped_release unlocked;
  host::gumbel_rows(seed, stream, from, rows, first, count, to);
}

void gumbel_of(const Array& bits, const Array& out) {
  const auto* from = bits.at<uint32_t>(kCpu, "bits", {kAny});
  host::gumbel(from, bits.size(0), out.at<float>(kCpu, "out", {bits.size(0)}));
}

void gumbel_keyed(const Array& keys, uint32_t first, const Array& out) {
  const int64_t rows = keys.size(0), count = out.size(1);
  const auto* from = keys.at<uint32_t>(kCpu, "keys", {kAny});
  auto* to = out.at<float>(kCpu, "out", {rows, kAny});
  py::gil_scoped_release unlocked;
  host::gumbel_keyed(from, rows, first, count, to);
}

ScoreArgs score_args(const Array& logits, int64_t vocab, const MaybeArray& bias, const MaybeArray& noise,
                     const MaybeArray& noise_rows, float temperature, float tau) {
  const int64_t rows = logits.size(0), columns = logits.size(1);
  check(temperature > 0 && tau > 0, "temperature and tau must be above 0");
  check(vocab >= 1 && vocab <= columns, "logits have fewer columns than the vocabulary");
  check(noise.has_value() == noise_rows.has_value(), "noise and noise_rows come together");
  const auto* from = static_cast<float*>(logits.rows_at(kFloat32, kCpu, "logits", {kAny, kAny}));
  const ScoreArgs args{from,
                       at_or_null<float>(bias, kCpu, "bias", {vocab}),
                       at_or_null<float>(noise, kCpu, "noise", {kAny, vocab}),
                       at_or_null<int64_t>(noise_rows, kCpu, "noise_rows", {rows}),
                       temperature,
                       tau,
                       rows,
                       vocab,
                       rows > 1 ? logits.stride(0) : columns};
  check(args.stride >= vocab, "the rows of logits overlap");
  if (noise) check_range(args.rows_of_noise, rows, noise->size(0), "a row of noise is not there");
  return args;
}

void draw(const Array& logits, int64_t vocab, const MaybeArray& bias, const MaybeArray& noise,
          const MaybeArray& noise_rows, float temperature, const Array& tokens) {
  const ScoreArgs args = score_args(logits, vocab, bias, noise, noise_rows, temperature, 1.0f);
  auto* out = tokens.at<int64_t>(kCpu, "tokens", {args.rows});
  py::gil_scoped_release unlocked;
  host::draw(args, out, nullptr);
}

void children(const Array& logits, int64_t vocab, const MaybeArray& bias, const MaybeArray& noise,
              const MaybeArray& noise_rows, float temperature, float tau, const Array& tokens, const Array& values) {
  const ScoreArgs args = score_args(logits, vocab, bias, noise, noise_rows, temperature, tau);
  const int64_t k = tokens.size(1);
  check(k >= 1 && k <= vocab, "the number of children must be between 1 and the vocabulary size");
  auto* ids = tokens.at<int64_t>(kCpu, "tokens", {args.rows, kAny});
  auto* out = values.at<float>(kCpu, "values", {args.rows, k});
  py::gil_scoped_release unlocked;
  host::children(args, k, ids, out, nullptr);
}

void log_probs(const Array& logits, int64_t vocab, const MaybeArray& bias, float temperature, const Array& tokens,
               const Array& out) {
  const ScoreArgs args = score_args(logits, vocab, bias, {}, {}, temperature, 1.0f);
  const auto* of = tokens.at<int64_t>(kCpu, "tokens", {args.rows});
  check_range(of, args.rows, vocab, "a token lies outside the vocabulary");
  auto* values = out.at<float>(kCpu, "out", {args.rows});
  py::gil_scoped_release unlocked;
  host::log_probs(args, of, values);
}

void draw_keyed(const Array& logits, int64_t vocab, const MaybeArray& bias, float temperature, const Array& keys,
                const Array& tokens, const Array& values) {
  const ScoreArgs args = score_args(logits, vocab, bias, {}, {}, temperature, 1.0f);
  const auto* of = keys.at<uint32_t>(kCpu, "keys", {args.rows});
  auto* out = tokens.at<int64_t>(kCpu, "tokens", {args.rows});
  auto* log_probs = values.at<float>(kCpu, "values", {args.rows});
  py::gil_scoped_release unlocked;
  host::draw_keyed(args, of, out, log_probs);
}

void draw_filtered(const Array& logits, int64_t vocab, const MaybeArray& bias, float temperature,
                   const py::dict& filters, const Array& keys, const Array& tokens) {
  const host::FilterArgs filter = filter_args(filters);
  const ScoreArgs args = score_args(logits, vocab, bias, {}, {}, temperature, 1.0f);
  const auto* of = keys.at<uint32_t>(kCpu, "keys", {args.rows});
  auto* out = tokens.at<int64_t>(kCpu, "tokens", {args.rows});
  py::gil_scoped_release unlocked;
  host::draw_filtered(args, filter, of, out);
}

void filter_scores(const Array& logits, int64_t vocab, const MaybeArray& bias, float temperature,
                   const py::dict& filters) {
  const host::FilterArgs filter = filter_args(filters);
  const ScoreArgs args = score_args(logits, vocab, bias, {}, {}, temperature, 1.0f);
  auto* out = static_cast<float*>(logits.rows_at(kFloat32, kCpu, "logits", {kAny, kAny}));
  py::gil_scoped_release unlocked;
  host::filter_scores(args, filter, out);
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.def("noise_bits", &noise_bits, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("out"),
        "Fills `out` [rows, vocab] with noise bits of the positions [rows]; all int32.");
  m.def("gumbel_of", &gumbel_of, py::arg("bits"), py::arg("out"),
        "Converts noise bits to Gumbel noise (float32), as in gumbel_rows.");
  m.def("gumbel_rows", &gumbel_rows, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("first"),
        py::arg("out"),
        "Fills `out` [rows, count] float32 with the Gumbel noise of positions [rows] int32, for tokens from `first` "
        "on.");
  m.def("gumbel_keyed", &gumbel_keyed, py::arg("keys"), py::arg("first"), py::arg("out"),
        "As gumbel_rows, for the row keys [rows] int32.");
  m.def("draw", &draw, py::arg("logits"), py::arg("vocab"), py::arg("bias"), py::arg("noise"), py::arg("noise_rows"),
        py::arg("temperature"), py::arg("tokens"),
        "Per row the token of the highest score; see ScoreArgs in common/arguments.h.");
  m.def("children", &children, py::arg("logits"), py::arg("vocab"), py::arg("bias"), py::arg("noise"),
        py::arg("noise_rows"), py::arg("temperature"), py::arg("tau"), py::arg("tokens"), py::arg("values"),
        "Per row the k largest of log_softmax(scores) and their tokens; `tokens` and `values` are [rows, k].");
  m.def("log_probs", &log_probs, py::arg("logits"), py::arg("vocab"), py::arg("bias"), py::arg("temperature"),
        py::arg("tokens"), py::arg("out"), "Per row log_softmax(scores) at its token.");
  m.def("draw_keyed", &draw_keyed, py::arg("logits"), py::arg("vocab"), py::arg("bias"), py::arg("temperature"),
        py::arg("keys"), py::arg("tokens"), py::arg("values"),
        "Per row the token of the highest score with the noise of its key, and log_softmax(scores) at that token.");
  m.def("draw_filtered", &draw_filtered, py::arg("logits"), py::arg("vocab"), py::arg("bias"), py::arg("temperature"),
        py::arg("filters"), py::arg("keys"), py::arg("tokens"),
        "Per row the token of the highest score with the noise of its key, among the tokens that the filters keep.");
  m.def("filter_scores", &filter_scores, py::arg("logits"), py::arg("vocab"), py::arg("bias"), py::arg("temperature"),
        py::arg("filters"),
        "Replaces logits by scores, and the scores that the filters exclude by -inf.");
}

}  // namespace swiftspec::binding
