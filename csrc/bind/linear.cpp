// Linear layers on the CPU.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>

#include "bind/arguments.h"
#include "bind/attention_options.h"
#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

using host::Format;
using host::Weights;

host::ScaleType scale_type_of(const Array& scales) {
  if (scales.type() == kFloat16) return host::ScaleType::f16;
  if (scales.type() == kUint8) return host::ScaleType::u8;
  if (scales.type() == kInt8) return host::ScaleType::i8;
  return scales.type() == kBfloat16 ? host::ScaleType::bf16 : host::ScaleType::f32;
}

std::unique_ptr<Weights> make_weights(const Array& data, const MaybeArray& scales, const MaybeArray& zeros,
                                      const MaybeArray& bias, int64_t k, int64_t n, int int8_activations,
                                      const MaybeArray& minima, const MaybeArray& order,
                                      const MaybeArray& super_scales, const MaybeArray& super_minima) {
  size_arg("k", k, 1);
  size_arg("n", n, 1);
  const int64_t blocks = (n + kBlock - 1) / kBlock, padded = (k + 7) / 8 * 8;
  Weights made{};
  made.bias = at_or_null<float>(bias, kCpu, "bias", {n});
  made.k = k, made.n = n, made.int8_activations = int8_activations;
  if (scales) {
    const int64_t count = scales->size(1);
    made.scale_type = scale_type_of(*scales);
    const Type type = made.scale_type == host::ScaleType::f32 ? kFloat32 : scales->type();
    made.scales = scales->at(type, kCpu, "scales", {blocks, kAny, kBlock});
    made.group = count == 0 ? 0 : k / count;
    check(made.group >= 16 && made.group % 16 == 0 && made.group <= 128 && made.group * count == k,
          "a group must be a multiple of 16, at most 128, that divides k");
    made.format = zeros || data.size(1) == k / 8 ? Format::int4 : Format::int8;
    if (made.scale_type == host::ScaleType::u8 && !super_scales) {
      check(!zeros && !minima, "float4 weights have neither zeros nor minima");
      made.format = Format::float4, made.scale_type = host::ScaleType::exponent;
    }
    check(!zeros || !minima, "int4 weights have zeros or minima");
    if (zeros) made.zeros = zeros->at<uint8_t>(kCpu, "zeros", {blocks, count, kBlock});
    const bool supers = made.scale_type == host::ScaleType::u8 || made.scale_type == host::ScaleType::i8;
    check(supers == super_scales.has_value() && (supers && minima) == super_minima.has_value(),
          "scales and minima of int4 and int8 in one byte have super-scales, others have none");
    check(!supers || k % host::kSuperInputs == 0, "super-scales need a multiple of 256 inputs");
    const Type minima_type = supers ? kUint8 : type;
    if (minima) made.minima = minima->at(minima_type, kCpu, "minima", {blocks, count, kBlock});
    const Shape super_shape{blocks, k / host::kSuperInputs, kBlock};
    if (super_scales) made.super_scales = super_scales->at(kFloat16, kCpu, "super_scales", super_shape);
    if (super_minima) made.super_minima = super_minima->at(kFloat16, kCpu, "super_minima", super_shape);
    made.data = data.at<int32_t>(kCpu, "data", {blocks, k / (made.format == Format::int8 ? 4 : 8), kBlock});
  } else if (data.type() == kBfloat16) {
    made.format = Format::bf16;
    made.data = data.at<Bfloat16>(kCpu, "data", {blocks, padded / 2, kBlock, 2});
  } else {
    made.format = Format::f32;
    made.data = data.at<float>(kCpu, "data", {blocks, padded, kBlock});
  }
  check(int8_activations >= 0 && int8_activations <= 2, "int8_activations must be 0, 1 or 2");
  check(int8_activations == 0 || scales, "int8 activations need int4, int8 or float4 weights");
  if (order) {
    made.order = order->at<int32_t>(kCpu, "order", {k});
    check(std::all_of(made.order, made.order + k, [k](int32_t input) { return input >= 0 && input < k; }),
          "order must consist of inputs");
  }
  return std::make_unique<Weights>(made);
}

void linear(const Weights& weights, const Array& x, const MaybeArray& norm, float eps, const MaybeArray& residual,
            const Array& out, const std::string& gate_name, float scale, float softcap) {
  const int64_t rows = x.size(0), n = weights.n;
  const bool is_f32 = x.type() == kFloat32, logits = out.type() == kFloat32 && (!is_f32 || softcap > 0.0f);
  const Type type = model_type(is_f32);
  const host::Gate gate = gate_of(gate_name);
  const bool gated = gate != host::Gate::none;
  check(!gated || (n % 2 == 0 && !residual && !logits && scale == 1.0f), "a gate halves the outputs into out");
  check(!logits || !residual, "logits have no residual");
  check(is_f32 || weights.format != Format::f32, "float32 weights need a float32 model");
  const host::LinearArgs args{
      &weights,
      x.at(type, kCpu, "x", {kAny, weights.k}),
      at_or_null<float>(norm, kCpu, "norm", {weights.k}),
      eps,
      residual ? residual->at(type, kCpu, "residual", {rows, n}) : nullptr,
      logits ? nullptr : out.at(type, kCpu, "out", {rows, gated ? n / 2 : n}),
      logits ? out.at<float>(kCpu, "out", {rows, n}) : nullptr,
      gate,
      rows,
      scale,
      softcap};
  py::gil_scoped_release unlocked;
  host::linear(args, is_f32);
}

void mixture(const MlpArgs& mlp, const Array& x, const MaybeArray& norm, float eps, const Array& out) {
  const int64_t rows = size_arg("rows", x.size(0), 1), hidden = x.size(1);
  const bool is_f32 = x.type() == kFloat32;
  const Type type = model_type(is_f32);
  check(std::get<3>(mlp).value_or(nullptr) != nullptr, "a mixture needs a router");
  const host::MixtureArgs args{
      mlp_of(mlp, hidden, is_f32),
      x.at(type, kCpu, "x", {rows, hidden}),
      at_or_null<float>(norm, kCpu, "norm", {hidden}),
      eps,
      out.at(type, kCpu, "out", {rows, hidden}),
      rows};
  py::gil_scoped_release unlocked;
  host::mixture(args, is_f32);
}

void norm_add(const Array& x, const MaybeArray& norm, float eps, float scale, const Array& into) {
  const int64_t rows = x.size(0), n = x.size(1);
  const bool is_f32 = x.type() == kFloat32;
  const Type type = model_type(is_f32);
  const void* from = x.at(type, kCpu, "x", {kAny, kAny});
  const auto* weight = at_or_null<float>(norm, kCpu, "norm", {n});
  void* to = into.at(type, kCpu, "into", {rows, n});
  py::gil_scoped_release unlocked;
  host::norm_add(from, rows, n, weight, eps, scale, to, is_f32);
}

void apply_gates(const Array& x, const std::string& gate, const Array& gates) {
  const int64_t rows = gates.size(0), n = gates.size(1);
  const bool is_f32 = gates.type() == kFloat32;
  const Type type = model_type(is_f32);
  void* to = gates.at(type, kCpu, "gates", {rows, n});
  const void* from = x.rows_at(type, kCpu, "x", {rows, n});
  const host::Gate kind = gate_of(gate);
  check(kind != host::Gate::none, "a gate without activation");
  py::gil_scoped_release unlocked;
  host::apply_gates(from, x.stride(0), rows, n, kind, to, is_f32);
}

}  // namespace

void bind_linear(py::module_& m) {
  py::class_<Weights>(m, "Weights", "Packed weights of a projection of k inputs and n outputs. Keeps its arrays alive.")
      .def(py::init(&make_weights), py::arg("data"), py::arg("scales"), py::arg("zeros"), py::arg("bias"), py::arg("k"),
           py::arg("n"), py::arg("int8_activations"), py::arg("minima") = py::none(), py::arg("order") = py::none(),
           py::arg("super_scales") = py::none(), py::arg("super_minima") = py::none(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(),
           py::keep_alive<1, 9>(), py::keep_alive<1, 10>(), py::keep_alive<1, 11>(), py::keep_alive<1, 12>(),
           "`data`: blocks of 16 outputs in float32 or bfloat16; with `scales` int4 of k / 8 words or int8 of k / 4 "
           "words (layouts: host/ops/product.h); with uint8 `scales` but no `super_scales` float4 of k / 8 words, whose "
           "scales are exponents plus 127. `zeros`: of int4, by default 0 if there are `minima`, otherwise 8. "
           "`int8_activations`: int8 numbers to which an input is quantised, 0, 1 or 2. `minima`: added to the weights of a group. `order`: the "
           "input of x for each input of the matrix. `super_scales`, `super_minima`: float16 factors, per 256 inputs, "
           "of scales and minima of one byte.");
  m.def("linear", &linear, py::arg("weights"), py::arg("x"), py::arg("norm"), py::arg("eps"), py::arg("residual"),
        py::arg("out"), py::arg("gate"), py::arg("scale"), py::arg("softcap"),
        "RMSNorm, product and epilogue; see LinearArgs in kernels_host.h. A float32 `out` of a bfloat16 model receives "
        "logits, which are not rounded. `gate`: none, silu, gelu_tanh or clamped_swiglu.");
  m.def("mixture", &mixture, py::arg("mlp"), py::arg("x"), py::arg("norm"), py::arg("eps"), py::arg("out"),
        "RMSNorm and mixture of experts; see MixtureArgs in kernels_host.h. `mlp`: as for `Decoder`.");
  m.def("norm_add", &norm_add, py::arg("x"), py::arg("norm"), py::arg("eps"), py::arg("scale"), py::arg("into"),
        "Adds `scale` times the RMSNorm of the rows of `x` to `into`; without `norm`, `scale` times the rows.");
  m.def("apply_gates", &apply_gates, py::arg("x"), py::arg("gate"), py::arg("gates"),
        "gates = activation(gates) * x [rows, n], where `gate` names the activation; only the rows of `x` must be "
        "contiguous.");
}

}  // namespace swiftspec::binding
