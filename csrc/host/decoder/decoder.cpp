#include "host/decoder/decoder.h"

#include <algorithm>
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

Decoder::Decoder(const PackedModel& model, std::vector<PackedLayer> layers, std::vector<int64_t> hidden_layers)
    : model_(model),
      layers_(std::move(layers)),
      hidden_layers_(std::move(hidden_layers)),
      size_(model.is_f32 ? 4 : 2) {}

// Returns the buffer, which grows to the largest forward.
void* Decoder::reserve(Buffer& buffer, int64_t elements) const {
  const auto bytes = static_cast<size_t>(elements * size_);
  if (buffer.size() < bytes) buffer.resize(bytes);
  return buffer.data();
}

void Decoder::gather(const ForwardArgs& args) {
  const PackedModel& s = model_;
  gather_rows(s.embedding, args.tokens, args.rows, s.hidden * size_, reserve(hidden_, args.rows * s.hidden));
  gather_rows(s.cos, args.positions, args.rows, s.dim * size_, reserve(cos_, args.rows * s.dim));
  gather_rows(s.sin, args.positions, args.rows, s.dim * size_, reserve(sin_, args.rows * s.dim));
}

// Attention of q, k and v in `projected_`; the result is in `attended_`.
void Decoder::attend(const ForwardArgs& args, int64_t layer) {
  const PackedModel& s = model_;
  const int64_t in = (s.heads + 2 * s.kv_heads) * s.dim * size_, out = s.heads * s.dim * size_;
  const int64_t rope_bytes = s.dim * size_;
  reserve(attended_, args.rows * s.heads * s.dim);
  for (const SequenceRows& seq : args.sequence_rows) {
    const int64_t first = seq.first;
    attention({at(projected_.data(), first * in), at(cos_.data(), first * rope_bytes),
               at(sin_.data(), first * rope_bytes), args.slots + first, seq.mask,
               at(seq.keys, layer * args.layer_stride), at(seq.values, layer * args.layer_stride),
               at(attended_.data(), first * out), seq.rows, s.heads, s.kv_heads, args.capacity, seq.length, seq.width, s.dim},
              s.is_f32);
  }
}

// hidden_ += x W^T, summed over the ranks of a group.
void Decoder::add_linear(const Weights& weights, const void* x, int64_t rows) {
  void* hidden = hidden_.data();
  if (model_.group == nullptr) {
    linear({&weights, x, nullptr, 0.0f, hidden, hidden, nullptr, false, rows}, model_.is_f32);
    return;
  }
  const int64_t count = rows * model_.hidden;
  void* product = reserve(product_, count);
  linear({&weights, x, nullptr, 0.0f, nullptr, product, nullptr, false, rows}, model_.is_f32);
  model_.group->all_reduce(product, count, model_.is_f32 ? Element::kFloat32 : Element::kBfloat16, model_.timeout_s);
  add(product, count, hidden, model_.is_f32);
}

// Copies hidden_ to `hidden_states_` if the hidden states of this layer are wanted.
void Decoder::keep_hidden(int64_t layer, int64_t rows) {
  const auto found = std::find(hidden_layers_.begin(), hidden_layers_.end(), layer);
  if (found == hidden_layers_.end()) return;
  const int64_t bytes = model_.hidden * size_;
  void* states = reserve(hidden_states_, rows * num_hidden_layers() * model_.hidden);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t index = row * num_hidden_layers() + (found - hidden_layers_.begin());
    std::memcpy(at(states, index * bytes), at(hidden_.data(), row * bytes), static_cast<size_t>(bytes));
  }
}

void Decoder::forward(const ForwardArgs& args) {
  const PackedModel& s = model_;
  const int64_t rows = args.rows;
  hidden_rows_ = 0;
  gather(args);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const PackedLayer& layer = layers_[i];
    linear({layer.qkv, hidden_.data(), layer.input_norm, s.eps, nullptr, reserve(projected_, rows * layer.qkv->n),
            nullptr, false, rows},
           s.is_f32);
    attend(args, static_cast<int64_t>(i));
    add_linear(*layer.o, attended_.data(), rows);
    linear({layer.gate_up, hidden_.data(), layer.post_norm, s.eps, nullptr,
            reserve(projected_, rows * layer.gate_up->n / 2), nullptr, true, rows},
           s.is_f32);
    add_linear(*layer.down, projected_.data(), rows);
    keep_hidden(static_cast<int64_t>(i), rows);
  }
  if (!hidden_layers_.empty()) hidden_rows_ = rows;
  if (args.logits == nullptr) return;
  const void* last = at(hidden_.data(), args.logits_from * s.hidden * size_);
  linear({s.head, last, s.norm, s.eps, nullptr, nullptr, args.logits, false, rows - args.logits_from}, s.is_f32);
}

}  // namespace swiftspec::host
