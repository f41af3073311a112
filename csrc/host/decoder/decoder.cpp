#include "host/decoder/decoder.h"

#include <cstring>
#include <utility>

namespace swiftspec::host {

namespace {

uint8_t* at(void* base, int64_t bytes) { return static_cast<uint8_t*>(base) + bytes; }
const uint8_t* at(const void* base, int64_t bytes) { return static_cast<const uint8_t*>(base) + bytes; }

// out[i] = table[index[i]], rows of `bytes`.
void gather_rows(const void* table, const int64_t* index, int64_t rows, int64_t bytes, void* out) {
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(at(out, i * bytes), at(table, index[i] * bytes), static_cast<size_t>(bytes));
  }
}

}  // namespace

Decoder::Decoder(const Stack& stack, std::vector<Layer> layers)
    : stack_(stack), layers_(std::move(layers)), size_(stack.wide ? 4 : 2) {}

// Grows to the largest step once.
void* Decoder::room(Buffer& buffer, int64_t elements) const {
  const auto bytes = static_cast<size_t>(elements * size_);
  if (buffer.size() < bytes) buffer.resize(bytes);
  return buffer.data();
}

void Decoder::gather(const Step& step) {
  const Stack& s = stack_;
  gather_rows(s.embedding, step.tokens, step.rows, s.hidden * size_, room(hidden_, step.rows * s.hidden));
  gather_rows(s.cos, step.positions, step.rows, s.dim * size_, room(cos_, step.rows * s.dim));
  gather_rows(s.sin, step.positions, step.rows, s.dim * size_, room(sin_, step.rows * s.dim));
}

// From `wide_`, which holds q, k and v, to `attended_`.
void Decoder::attend(const Step& step, int64_t layer) {
  const Stack& s = stack_;
  const int64_t in = (s.heads + 2 * s.kv_heads) * s.dim * size_, out = s.heads * s.dim * size_;
  const int64_t turn = s.dim * size_;
  room(attended_, step.rows * s.heads * s.dim);
  for (const Part& part : step.parts) {
    const int64_t first = part.first;
    attention({at(wide_.data(), first * in), at(cos_.data(), first * turn), at(sin_.data(), first * turn),
               step.slots + first, part.mask, at(part.keys, layer * step.layer_stride),
               at(part.values, layer * step.layer_stride), at(attended_.data(), first * out), part.rows, s.heads,
               s.kv_heads, step.capacity, part.length, part.width, s.dim},
              s.wide);
  }
}

// hidden_ += x W^T, which the ranks of a group have each in part.
void Decoder::add_linear(const Weights& weights, const void* x, int64_t rows) {
  void* hidden = hidden_.data();
  if (stack_.group == nullptr) {
    linear({&weights, x, nullptr, 0.0f, hidden, hidden, nullptr, false, rows}, stack_.wide);
    return;
  }
  const int64_t count = rows * stack_.hidden;
  void* product = room(product_, count);
  linear({&weights, x, nullptr, 0.0f, nullptr, product, nullptr, false, rows}, stack_.wide);
  stack_.group->all_reduce(product, count, stack_.wide ? Element::kFloat32 : Element::kBfloat16, stack_.timeout);
  add(product, count, hidden, stack_.wide);
}

void Decoder::forward(const Step& step) {
  const Stack& s = stack_;
  const int64_t rows = step.rows;
  gather(step);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    linear({layer.qkv, hidden_.data(), layer.input_norm, s.eps, nullptr, room(wide_, rows * layer.qkv->n), nullptr,
            false, rows},
           s.wide);
    attend(step, static_cast<int64_t>(i));
    add_linear(*layer.o, attended_.data(), rows);
    linear({layer.gate_up, hidden_.data(), layer.post_norm, s.eps, nullptr, room(wide_, rows * layer.gate_up->n / 2),
            nullptr, true, rows},
           s.wide);
    add_linear(*layer.down, wide_.data(), rows);
  }
  if (step.logits == nullptr) return;
  const void* last = at(hidden_.data(), step.logits_from * s.hidden * size_);
  linear({s.head, last, s.norm, s.eps, nullptr, nullptr, step.logits, false, rows - step.logits_from}, s.wide);
}

}  // namespace swiftspec::host
