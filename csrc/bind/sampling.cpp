// Noise on the CPU, and from logits to tokens.
#include "bind/arguments.h"
#include "bind/module.h"
#include "common/noise.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

void noise_bits(uint64_t seed, uint32_t stream, uintptr_t positions, int64_t rows, int64_t vocab, uintptr_t out) {
  const NoiseArgs args(positions, rows, vocab, out);
  py::gil_scoped_release unlocked;
  host::noise_bits(seed, stream, args.positions, rows, vocab, args.out);
}

void gumbel_rows(uint64_t seed, uint32_t stream, uintptr_t positions, int64_t rows, uint32_t first, int64_t count,
                 uintptr_t out) {
  const NoiseArgs args(positions, rows, count, out);
  py::gil_scoped_release unlocked;
  auto* noise = reinterpret_cast<float*>(args.out);
  host::gumbel_rows(seed, stream, args.positions, rows, first, count, noise);
}

void gumbel_of(uintptr_t bits, int64_t count, uintptr_t out) {
  size_arg("count", count, 0);
  host::gumbel(pointer_arg<const uint32_t>("bits", bits, count), count, pointer_arg<float>("out", out, count));
}

void gumbel_keyed(uintptr_t keys, int64_t rows, uint32_t first, int64_t count, uintptr_t out) {
  size_arg("rows", rows, 0);
  size_arg("count", count, 1);
  const auto* of = pointer_arg<const uint32_t>("keys", keys, rows);
  auto* noise = pointer_arg<float>("out", out, rows);
  py::gil_scoped_release unlocked;
  host::gumbel_keyed(of, rows, first, count, noise);
}

ScoreArgs score_args(uintptr_t logits, uintptr_t bias, uintptr_t noise, uintptr_t rows_of_noise, int64_t noise_rows,
                     float temperature, float tau, int64_t rows, int64_t vocab, int64_t stride) {
  size_arg("rows", rows, 0);
  size_arg("vocab", vocab, 1);
  size_arg("stride", stride, vocab);
  check(temperature > 0 && tau > 0, "temperature and tau must be above 0");
  const ScoreArgs args{pointer_arg<const float>("logits", logits, rows),
                       pointer_arg<const float>("bias", bias, 0),
                       pointer_arg<const float>("noise", noise, noise_rows),
                       pointer_arg<const int64_t>("rows_of_noise", rows_of_noise, noise == 0 ? 0 : rows),
                       temperature,
                       tau,
                       rows,
                       vocab,
                       stride};
  for (int64_t row = 0; noise != 0 && row < rows; ++row) {
    check(args.rows_of_noise[row] >= 0 && args.rows_of_noise[row] < noise_rows, "a row of noise that is not there");
  }
  return args;
}

void draw(uintptr_t logits, uintptr_t bias, uintptr_t noise, uintptr_t rows_of_noise, int64_t noise_rows,
          float temperature, int64_t rows, int64_t vocab, int64_t stride, uintptr_t tokens) {
  const auto args = score_args(logits, bias, noise, rows_of_noise, noise_rows, temperature, 1.0f, rows, vocab, stride);
  int64_t* out = pointer_arg<int64_t>("tokens", tokens, rows);
  py::gil_scoped_release unlocked;
  host::draw(args, out, nullptr);
}

void children(uintptr_t logits, uintptr_t bias, uintptr_t noise, uintptr_t rows_of_noise, int64_t noise_rows,
              float temperature, float tau, int64_t rows, int64_t vocab, int64_t stride, int64_t k, uintptr_t tokens,
              uintptr_t values) {
  const auto args = score_args(logits, bias, noise, rows_of_noise, noise_rows, temperature, tau, rows, vocab, stride);
  check(k >= 1 && k <= vocab, "k must lie in 1..vocab");
  int64_t* ids = pointer_arg<int64_t>("tokens", tokens, rows);
  float* out = pointer_arg<float>("values", values, rows);
  py::gil_scoped_release unlocked;
  host::children(args, k, ids, out, nullptr);
}

void log_probs(uintptr_t logits, uintptr_t bias, float temperature, int64_t rows, int64_t vocab, int64_t stride,
               uintptr_t tokens, uintptr_t out) {
  const auto args = score_args(logits, bias, 0, 0, 0, temperature, 1.0f, rows, vocab, stride);
  const auto* of = pointer_arg<const int64_t>("tokens", tokens, rows);
  check_inside(of, rows, vocab, "a token lies outside the vocabulary");
  auto* values = pointer_arg<float>("out", out, rows);
  py::gil_scoped_release unlocked;
  host::log_probs(args, of, values);
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.def("noise_bits", &noise_bits, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("rows"),
        py::arg("vocab"), py::arg("out"),
        "Fill out[rows, vocab] (uint32, host) with the noise of the rows at positions[rows] (int32, host).");
  m.def("gumbel", &noise::gumbel, py::arg("bits"), "The float32 Gumbel draw of 32 noise bits.");
  m.def("gumbel64", &noise::gumbel64, py::arg("bits"), "The float64 Gumbel draw of 32 noise bits.");
  m.def("gumbel_of", &gumbel_of, py::arg("bits"), py::arg("count"), py::arg("out"),
        "The Gumbel noise (float32) of bits[count] (uint32), as gumbel_rows computes it.");
  m.def("gumbel_rows", &gumbel_rows, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("rows"),
        py::arg("first"), py::arg("count"), py::arg("out"),
        "noise_bits of `count` tokens from `first` on, as Gumbel noise (float32).");
  m.def("gumbel_keyed", &gumbel_keyed, py::arg("keys"), py::arg("rows"), py::arg("first"), py::arg("count"),
        py::arg("out"), "gumbel_rows of rows with these keys (uint32).");
  m.def("draw", &draw, py::arg("logits"), py::arg("bias"), py::arg("noise"), py::arg("rows_of_noise"),
        py::arg("noise_rows"), py::arg("temperature"), py::arg("rows"), py::arg("vocab"), py::arg("stride"),
        py::arg("tokens"), "The token of each row's highest score; see ScoreArgs in kernels_host.h.");
  m.def("children", &children, py::arg("logits"), py::arg("bias"), py::arg("noise"), py::arg("rows_of_noise"),
        py::arg("noise_rows"), py::arg("temperature"), py::arg("tau"), py::arg("rows"), py::arg("vocab"),
        py::arg("stride"), py::arg("k"), py::arg("tokens"), py::arg("values"),
        "The k largest of each row's log_softmax(scores); see ScoreArgs in kernels_host.h.");
  m.def("log_probs", &log_probs, py::arg("logits"), py::arg("bias"), py::arg("temperature"), py::arg("rows"),
        py::arg("vocab"), py::arg("stride"), py::arg("tokens"), py::arg("out"),
        "Each row's log_softmax(scores) at its token; see ScoreArgs in kernels_host.h.");
}

}  // namespace swiftspec::binding
