// The whole decoder for Python. Who holds one keeps the tensors, weights and group behind it alive.
#include "host/decoder/decoder.h"

#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

using host::Weights;
// input norm, qkv, o, post norm, gate_up, down
using LayerArgs = std::tuple<uintptr_t, const Weights*, const Weights*, uintptr_t, const Weights*, const Weights*>;
// first row, rows, mask, width, length, keys, values
using PartArgs = std::tuple<int64_t, int64_t, uintptr_t, int64_t, int64_t, uintptr_t, uintptr_t>;

bool has_shape(const Weights* weights, int64_t n, int64_t k, bool wide) {
  return weights != nullptr && weights->n == n && weights->k == k && (wide || weights->format != host::Format::f32);
}

host::Layer layer_of(const LayerArgs& args, const host::Stack& s) {
  const auto& [input_norm, qkv, o, post_norm, gate_up, down] = args;
  check(has_shape(qkv, (s.heads + 2 * s.kv_heads) * s.dim, s.hidden, s.wide) &&
            has_shape(o, s.hidden, s.heads * s.dim, s.wide) && gate_up != nullptr && gate_up->n % 2 == 0 &&
            has_shape(gate_up, gate_up->n, s.hidden, s.wide) && has_shape(down, s.hidden, gate_up->n / 2, s.wide),
        "a layer's projections do not fit each other");
  return {type_arg("input_norm", input_norm, s.wide, 1), qkv,     o,
          type_arg("post_norm", post_norm, s.wide, 1),   gate_up, down};
}

std::unique_ptr<host::Decoder> make_decoder(bool wide, float eps, int64_t hidden, int64_t heads, int64_t kv_heads,
                                            int64_t dim, int64_t vocab, int64_t positions, uintptr_t embedding,
                                            uintptr_t cos, uintptr_t sin, uintptr_t norm, const Weights& head,
                                            const std::vector<LayerArgs>& layers, host::Group* group, double timeout) {
  size_arg("hidden", hidden, 1);
  size_arg("vocab", vocab, 1);
  size_arg("positions", positions, 1);
  check(kv_heads >= 1 && heads >= kv_heads && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  check(dim % 16 == 0 && dim >= 16 && dim <= 256, "dim must be a multiple of 16 up to 256");
  const host::Stack stack{wide,
                          eps,
                          hidden,
                          heads,
                          kv_heads,
                          dim,
                          vocab,
                          positions,
                          type_arg("embedding", embedding, wide, vocab),
                          type_arg("cos", cos, wide, positions),
                          type_arg("sin", sin, wide, positions),
                          type_arg("norm", norm, wide, hidden),
                          &head,
                          group,
                          timeout};
  check(has_shape(&head, head.n, hidden, wide), "the head does not fit the hidden size");
  std::vector<host::Layer> made;
  for (const LayerArgs& layer : layers) made.push_back(layer_of(layer, stack));
  return std::make_unique<host::Decoder>(stack, std::move(made));
}

host::Part part_of(const PartArgs& args, const host::Step& step, bool wide) {
  const auto& [first, rows, mask, width, length, keys, values] = args;
  check(first >= 0 && rows >= 0 && first + rows <= step.rows, "a sequence's rows lie outside the batch");
  check(length >= 1 && length <= step.capacity && width >= 0 && width <= length,
        "width <= length <= capacity must hold");
  check_inside(step.slots + first, rows, length, "a slot lies outside the slots in use");
  return {first,
          rows,
          pointer_arg<const uint8_t>("mask", mask, rows * width),
          width,
          length,
          type_arg("keys", keys, wide, 1),
          type_arg("values", values, wide, 1)};
}

void forward(host::Decoder& decoder, uintptr_t tokens, uintptr_t positions, uintptr_t slots, int64_t rows,
             const std::vector<PartArgs>& parts, int64_t capacity, int64_t layer_stride, uintptr_t logits) {
  size_arg("rows", rows, 1);
  const host::Stack& stack = decoder.stack();
  host::Step step{pointer_arg<const int64_t>("tokens", tokens, rows),
                  pointer_arg<const int64_t>("positions", positions, rows),
                  pointer_arg<const int64_t>("slots", slots, rows),
                  rows,
                  {},
                  capacity,
                  layer_stride,
                  0,
                  pointer_arg<float>("logits", logits, 0)};
  check_inside(step.tokens, rows, stack.vocab, "a token lies outside the vocabulary");
  check_inside(step.positions, rows, stack.positions, "a position lies outside the context");
  for (const PartArgs& part : parts) step.parts.push_back(part_of(part, step, stack.wide));
  py::gil_scoped_release unlocked;
  decoder.forward(step);
}

}  // namespace

void bind_decoder(py::module_& m) {
  py::class_<host::Decoder>(m, "Decoder", "All layers as one call; see Stack and Step in host/decoder/decoder.h.")
      .def(py::init(&make_decoder), py::arg("wide"), py::arg("eps"), py::arg("hidden"), py::arg("heads"),
           py::arg("kv_heads"), py::arg("dim"), py::arg("vocab"), py::arg("positions"), py::arg("embedding"),
           py::arg("cos"), py::arg("sin"), py::arg("norm"), py::arg("head"), py::arg("layers"), py::arg("group"),
           py::arg("timeout"))
      .def("forward", &forward, py::arg("tokens"), py::arg("positions"), py::arg("slots"), py::arg("rows"),
           py::arg("parts"), py::arg("capacity"), py::arg("layer_stride"), py::arg("logits"));
}

}  // namespace swiftspec::binding
