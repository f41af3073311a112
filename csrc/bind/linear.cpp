// Projections on the CPU.
#include <pybind11/stl.h>

#include <memory>

#include "bind/arguments.h"
#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

using host::Format;
using host::Weights;

constexpr int64_t kBlock = 16;  // outputs of a block; host/ops/product.h has the layouts

std::unique_ptr<Weights> make_weights(const Array& data, const MaybeArray& groups, const MaybeArray& bias, int64_t k,
                                      int64_t n) {
  size_arg("k", k, 1);
  size_arg("n", n, 1);
  const int64_t blocks = (n + kBlock - 1) / kBlock, padded = (k + 7) / 8 * 8;
  Weights made{Format::f32, nullptr, nullptr, at_or_null<float>(bias, kCpu, "bias", {n}), k, n, 0};
  if (groups) {
    const int64_t count = groups->size(1);
    made.format = Format::int4;
    made.groups = groups->at<float>(kCpu, "groups", {blocks, kAny, 2, kBlock});
    made.group = count == 0 ? 0 : k / count;
    check(made.group >= 16 && made.group % 16 == 0 && made.group * count == k,
          "a group must be a multiple of 16 that divides k");
    made.data = data.at<int32_t>(kCpu, "data", {blocks, k / 8, kBlock});
  } else if (data.type() == kBfloat16) {
    made.format = Format::bf16;
    made.data = data.at<Bfloat16>(kCpu, "data", {blocks, padded / 2, kBlock, 2});
  } else {
    made.data = data.at<float>(kCpu, "data", {blocks, padded, kBlock});
  }
  return std::make_unique<Weights>(made);
}

void linear(const Weights& weights, const Array& x, const MaybeArray& norm, float eps, const MaybeArray& residual,
            const Array& out, bool swiglu) {
  const int64_t rows = x.size(0), n = weights.n;
  const bool wide = x.type() == kFloat32, logits = out.type() == kFloat32 && !wide;
  const Type type = model_type(wide);
  check(!swiglu || (n % 2 == 0 && !residual && !logits), "swiglu halves the outputs into out");
  check(!logits || !residual, "logits have no residual");
  check(wide || weights.format != Format::f32, "float32 weights need a float32 model");
  const host::LinearArgs args{
      &weights,
      x.at(type, kCpu, "x", {kAny, weights.k}),
      norm ? norm->at(type, kCpu, "norm", {weights.k}) : nullptr,
      eps,
      residual ? residual->at(type, kCpu, "residual", {rows, n}) : nullptr,
      logits ? nullptr : out.at(type, kCpu, "out", {rows, swiglu ? n / 2 : n}),
      logits ? out.at<float>(kCpu, "out", {rows, n}) : nullptr,
      swiglu,
      rows};
  py::gil_scoped_release unlocked;
  host::linear(args, wide);
}

}  // namespace

void bind_linear(py::module_& m) {
  py::class_<Weights>(m, "Weights", "A projection of k inputs and n outputs, whose arrays it keeps alive.")
      .def(py::init(&make_weights), py::arg("data"), py::arg("groups"), py::arg("bias"), py::arg("k"), py::arg("n"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           "`data`: blocks of 16 outputs, float32, bfloat16 or, with `groups`, int4; host/ops/product.h has their "
           "layouts.");
  m.def("linear", &linear, py::arg("weights"), py::arg("x"), py::arg("norm"), py::arg("eps"), py::arg("residual"),
        py::arg("out"), py::arg("swiglu"),
        "RMSNorm, product and epilogue; see LinearArgs in kernels_host.h. With a float32 `out` a bfloat16 model's "
        "outputs are not rounded: logits.");
}

}  // namespace swiftspec::binding
