// Bindings of noise and sampling on a GPU.
#include <pybind11/stl.h>

#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

void gumbel_rows(uint64_t seed, uint32_t noise_stream, const Array& positions, uint32_t first, const Array& out,
                 uintptr_t stream) {
  const int64_t rows = positions.size(0), count = out.size(1);
  check(rows >= 1 && rows < 65536 && int32_sized(count), "between 1 and 65535 rows");
  const Device here = gpu();
  cuda::gumbel_rows(seed, noise_stream, positions.at<int64_t>(here, "positions", {kAny}), rows, first, count,
                    out.at<float>(here, "out", {rows, kAny}), stream_arg(stream));
}

ScoreArgs score_args(Device here, const Array& logits, int64_t vocab, const MaybeArray& bias, const MaybeArray& noise,
                     const MaybeArray& noise_rows, float temperature, float tau, const MaybeArray& scalars = {}) {
  const int64_t rows = logits.size(0), columns = logits.size(1);
  check(temperature > 0 && tau > 0, "temperature and tau must be above 0");
  check(rows >= 1 && rows < 65536 && vocab >= 1 && vocab <= columns, "between 1 and 65535 rows of at least `vocab`");
  check(noise.has_value() == noise_rows.has_value(), "noise and noise_rows come together");
  const auto* from = static_cast<float*>(logits.rows_at(kFloat32, here, "logits", {kAny, kAny}));
  const ScoreArgs args{from,
                       at_or_null<float>(bias, here, "bias", {vocab}),
                       at_or_null<float>(noise, here, "noise", {kAny, vocab}),
                       at_or_null<int64_t>(noise_rows, here, "noise_rows", {rows}),
                       temperature,
                       tau,
                       rows,
                       vocab,
                       rows > 1 ? logits.stride(0) : columns,
                       at_or_null<double>(scalars, here, "scalars", {3})};
  check(args.stride >= vocab && int32_sized(args.stride), "the rows of logits overlap, or are too long");
  return args;
}

void draw(const Array& logits, int64_t vocab, const MaybeArray& bias, const MaybeArray& noise,
          const MaybeArray& noise_rows, float temperature, const MaybeArray& scalars, const Array& tokens,
          uintptr_t stream) {
  const Device here = gpu();
  const ScoreArgs args = score_args(here, logits, vocab, bias, noise, noise_rows, temperature, 1.0f, scalars);
  cuda::children(args, 1, tokens.at<int64_t>(here, "tokens", {args.rows}), nullptr, stream_arg(stream));
}

void children(const Array& logits, int64_t vocab, const MaybeArray& bias, const MaybeArray& noise,
              const MaybeArray& noise_rows, float temperature, float tau, const MaybeArray& scalars,
              const Array& tokens, const Array& values, uintptr_t stream) {
  const Device here = gpu();
  const ScoreArgs args = score_args(here, logits, vocab, bias, noise, noise_rows, temperature, tau, scalars);
  const int64_t k = tokens.size(1);
  check(k >= 1 && k <= 64 && k <= vocab, "1 to 64 children, and no more than the vocabulary has");
  cuda::children(args, k, tokens.at<int64_t>(here, "tokens", {args.rows, kAny}),
                 values.at<float>(here, "values", {args.rows, k}), stream_arg(stream));
}

void draw_keyed(const Array& logits, int64_t vocab, const MaybeArray& bias, float temperature,
                const MaybeArray& scalars, const MaybeArray& keys, const Array& tokens, const Array& values,
                uintptr_t stream) {
  const Device here = gpu();
  const bool several = scalars.has_value() && scalars->size(1) == 3;
  ScoreArgs args = score_args(here, logits, vocab, several ? MaybeArray{} : bias, {}, {}, temperature, 1.0f,
                              several ? MaybeArray{} : scalars);
  if (several) {
    const int64_t sets = scalars->size(0);
    check(sets >= 1 && args.rows % sets == 0 && int32_sized(sets * vocab), "each set of scalars needs equally many rows");
    args.scalars = scalars->at<double>(here, "scalars", {sets, 3});
    args.bias = at_or_null<float>(bias, here, "bias", {sets, vocab});
    args.rows_per_set = args.rows / sets;
  }
  cuda::draw_keyed(args, at_or_null<uint32_t>(keys, here, "keys", {args.rows}),
                   tokens.at<int64_t>(here, "tokens", {args.rows}), values.at<float>(here, "values", {args.rows}),
                   stream_arg(stream));
}

}  // namespace

void bind_cuda_sampling(py::module_& m) {
  m.def("gumbel_rows_cuda", &gumbel_rows, py::arg("seed"), py::arg("noise_stream"), py::arg("positions"),
        py::arg("first"), py::arg("out"), py::arg("stream"),
        "Gumbel noise [rows, count] float32 of positions [rows] int64, for the tokens from `first` on.");
  m.def("draw_cuda", &draw, py::arg("logits"), py::arg("vocab"), py::arg("bias"), py::arg("noise"),
        py::arg("noise_rows"), py::arg("temperature"), py::arg("scalars"), py::arg("tokens"), py::arg("stream"),
        "The token of each row's highest score; see ScoreArgs in common/arguments.h.");
  m.def("children_cuda", &children, py::arg("logits"), py::arg("vocab"), py::arg("bias"), py::arg("noise"),
        py::arg("noise_rows"), py::arg("temperature"), py::arg("tau"), py::arg("scalars"), py::arg("tokens"),
        py::arg("values"), py::arg("stream"), "The k largest log_softmax(scores) of each row, into tokens and values [rows, k].");
  m.def("draw_keyed_cuda", &draw_keyed, py::arg("logits"), py::arg("vocab"), py::arg("bias"), py::arg("temperature"),
        py::arg("scalars"), py::arg("keys"), py::arg("tokens"), py::arg("values"), py::arg("stream"),
        "The token of each row's highest score under the noise of its key (without keys, the token is an input) and "
        "log_softmax(scores) there. Scalars [sets, 3] come with bias [sets, vocab], for equally many rows each.");
}

}  // namespace swiftspec::binding
