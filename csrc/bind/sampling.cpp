// From logits to tokens on the CPU.
#include "bind/arguments.h"
#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

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
