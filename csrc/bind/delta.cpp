// Delta layers on the CPU.
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "bind/delta_cache.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

host::DeltaCache make_delta_cache(const Array& state, const Array& keys, const Array& updates, const Array& decays,
                            const Array& inputs, const Array& folded, int64_t conv_width) {
  host::DeltaCache cache{};
  cache.layers = state.size(0), cache.sequences = state.size(1), cache.slots = keys.size(2);
  cache.shape = {keys.size(3), state.size(2), state.size(3), state.size(4), conv_width};
  check_shape(cache.shape);
  const int64_t l = cache.layers, s = cache.sequences, slots = cache.slots;
  const host::DeltaShape& shape = cache.shape;
  cache.state = state.at<float>(kCpu, "state", {l, s, shape.v_heads, shape.k_dim, shape.v_dim});
  cache.keys = keys.at<float>(kCpu, "keys", {l, s, slots, shape.k_heads, shape.k_dim});
  cache.updates = updates.at<float>(kCpu, "updates", {l, s, slots, shape.v_heads, shape.v_dim});
  cache.decays = decays.at<float>(kCpu, "decays", {l, s, slots, shape.v_heads});
  const Type type = model_type(inputs.type() == kFloat32);
  cache.inputs = static_cast<uint8_t*>(inputs.at(type, kCpu, "inputs", {l, s, slots, shape.conv_size()}));
  cache.input_bytes = type.bits / 8;
  cache.folded = folded.at<int64_t>(kCpu, "folded", {s});
  return cache;
}

// The rows of one sequence in a forward, for all delta layers.
struct DeltaRows {
  const host::DeltaCache& cache;
  int64_t sequence, rows;
  host::DeltaPlan plan;
};

std::unique_ptr<DeltaRows> make_rows(const Array& slots, const Array& mask, const host::DeltaCache& cache,
                                     int64_t sequence, int64_t length) {
  const int64_t rows = slots.size(0), width = mask.size(1);
  check(sequence >= 0 && sequence < cache.sequences, "a region that the delta cache lacks");
  const int64_t folded = cache.folded[sequence];
  check(length - folded <= cache.slots && width <= length && folded <= length, "the slots do not fit the delta cache");
  const auto* own = slots.at<int64_t>(kCpu, "slots", {rows});
  for (int64_t i = 0; i < rows; ++i) check(own[i] >= folded && own[i] < length, "a slot is not in use");
  const auto* visible = mask.at<bool>(kCpu, "mask", {rows, kAny});
  return std::make_unique<DeltaRows>(
      DeltaRows{cache, sequence, rows, host::plan_delta(own, visible, rows, width, length, folded)});
}

void gated_delta(const DeltaRows& rows, const Array& projected, const Array& rates, int64_t layer, const Array& conv,
                 const Array& decay_factor, const Array& decay_bias, const Array& norm, float eps, const Array& out) {
  const host::DeltaCache& cache = rows.cache;
  const host::DeltaShape& shape = cache.shape;
  const bool is_f32 = cache.input_bytes == sizeof(float);
  const Type type = model_type(is_f32);
  check(layer >= 0 && layer < cache.layers, "a region that the delta cache lacks");
  const host::DeltaArgs args{
      .projected = projected.at(type, kCpu, "projected", {rows.rows, shape.conv_size() + shape.v_size()}),
      .rates = rates.at(type, kCpu, "rates", {rows.rows, 2 * shape.v_heads}),
      .shape = shape,
      .slots = cache.at(layer, rows.sequence),
      .plan = &rows.plan,
      .conv = conv.at<float>(kCpu, "conv", {shape.conv_width, shape.conv_size()}),
      .decay_factor = decay_factor.at<float>(kCpu, "decay_factor", {shape.v_heads}),
      .decay_bias = decay_bias.at<float>(kCpu, "decay_bias", {shape.v_heads}),
      .norm = norm.at<float>(kCpu, "norm", {shape.v_dim}),
      .eps = eps,
      .out = out.at(type, kCpu, "out", {rows.rows, shape.v_size()})};
  py::gil_scoped_release unlocked;
  host::gated_delta(args, is_f32);
}

void fold_delta(const Array& state, const Array& keys, const Array& updates, const Array& decays) {
  const host::DeltaShape shape{keys.size(1), state.size(0), state.size(1), state.size(2), 1};
  check_shape(shape);
  constexpr int64_t kSlots = host::kFoldPositions;
  const host::DeltaSlots slots{state.at<float>(kCpu, "state", {shape.v_heads, shape.k_dim, shape.v_dim}),
                               keys.at<float>(kCpu, "keys", {kSlots, shape.k_heads, shape.k_dim}),
                               updates.at<float>(kCpu, "updates", {kSlots, shape.v_heads, shape.v_dim}),
                               decays.at<float>(kCpu, "decays", {kSlots, shape.v_heads}), nullptr};
  py::gil_scoped_release unlocked;
  host::fold_delta(shape, slots);
}

void multiply_sigmoid(const Array& gate, const Array& into) {
  const int64_t rows = into.size(0), n = into.size(1);
  const bool is_f32 = into.type() == kFloat32;
  const Type type = model_type(is_f32);
  void* to = into.at(type, kCpu, "into", {rows, n});
  const void* from = gate.rows_at(type, kCpu, "gate", {rows, n});
  py::gil_scoped_release unlocked;
  host::multiply_sigmoid(from, gate.stride(0), rows, n, to, is_f32);
}

}  // namespace

void bind_delta(py::module_& m) {
  py::class_<host::DeltaCache>(m, "DeltaCache",
                               "Buffers of a delta cache, which it keeps alive; see swiftspec/cache/delta.py.")
      .def(py::init(&make_delta_cache), py::arg("state"), py::arg("keys"), py::arg("updates"), py::arg("decays"),
           py::arg("inputs"), py::arg("folded"), py::arg("conv_width"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(),
           py::keep_alive<1, 7>());
  py::class_<DeltaRows>(m, "DeltaRows",
                        "The rows of one sequence in a forward, with `length` slots in use, for all delta layers. Keeps "
                        "the cache alive.")
      .def(py::init(&make_rows), py::arg("slots"), py::arg("mask"), py::arg("cache"), py::arg("sequence"),
           py::arg("length"), py::keep_alive<1, 4>())
      .def("gated_delta", &gated_delta, py::arg("projected"), py::arg("rates"), py::arg("layer"), py::arg("conv"),
           py::arg("decay_factor"), py::arg("decay_bias"), py::arg("norm"), py::arg("eps"), py::arg("out"),
           "Convolution, gated delta rule, norm and gate of the rows; see DeltaArgs in kernels_host.h.");
  m.def("fold_delta", &fold_delta, py::arg("state"), py::arg("keys"), py::arg("updates"), py::arg("decays"),
        "Folds 32 slots of one layer and sequence into its state, in place.");
  m.def("multiply_sigmoid", &multiply_sigmoid, py::arg("gate"), py::arg("into"),
        "into *= sigmoid(gate) [rows, n]; only the rows of `gate` must be contiguous.");
}

}  // namespace swiftspec::binding
