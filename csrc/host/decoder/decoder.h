// A whole decoder as one call: embedding, layers, head. The operators of kernels_host.h in their order, on
// buffers that are made once.
#pragma once

#include <cstdint>
#include <vector>

#include "host/shm/ll_shm.h"
#include "kernels_host.h"

namespace swiftspec::host {

struct Layer {
  const void* input_norm;  // [hidden] T
  const Weights* qkv;      // hidden -> (heads + 2 kv_heads) dim
  const Weights* o;        // heads dim -> hidden
  const void* post_norm;   // [hidden] T
  const Weights* gate_up;  // hidden -> 2 width of the MLP
  const Weights* down;
};

// One model, or one rank's share of it. T is float32 or bfloat16.
struct Stack {
  bool wide;  // T is float32
  float eps;  // of every norm
  int64_t hidden, heads, kv_heads, dim;
  int64_t vocab, positions;  // rows of the embedding, and of cos and sin
  const void* embedding;     // [vocab, hidden] T
  const void* cos;           // [positions, dim] T
  const void* sin;           // the same, negative in its first half
  const void* norm;          // [hidden] T, the last one
  const Weights* head;
  Group* group;    // which sums the outputs of `o` and `down` over the ranks, or null
  double timeout;  // seconds that it may wait for them
};

// The rows of one sequence, which follow each other.
struct Part {
  int64_t first, rows;
  const uint8_t* mask;    // [rows, width], as AttentionArgs has it
  int64_t width, length;  // length: slots in use
  void* keys;             // of the first layer: [kv_heads, capacity, dim]
  void* values;
};

struct Step {
  const int64_t* tokens;     // [rows]
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows]
  int64_t rows;
  std::vector<Part> parts;
  int64_t capacity, layer_stride;  // slots of a region; bytes from one layer's region to the next
  int64_t logits_from;             // rows before it have no logits
  float* logits;                   // [rows - logits_from, outputs of the head], or null
};

class Decoder {
 public:
  Decoder(const Stack& stack, std::vector<Layer> layers);

  // Throws what the group throws.
  void forward(const Step& step);

  const Stack& stack() const { return stack_; }
  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }

 private:
  using Buffer = std::vector<uint8_t>;

  void* room(Buffer& buffer, int64_t elements) const;
  void gather(const Step& step);
  void attend(const Step& step, int64_t layer);
  void add_linear(const Weights& weights, const void* x, int64_t rows);

  Stack stack_;
  std::vector<Layer> layers_;
  int64_t size_;  // bytes of a T
  Buffer hidden_, cos_, sin_, wide_, attended_, product_;
};

}  // namespace swiftspec::host
