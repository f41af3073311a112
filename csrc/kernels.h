// Every launch, on one page. Raw pointers, sizes and (on the device) a stream; the callers have checked the arguments.
// A launch is asynchronous and throws std::runtime_error when CUDA refuses it.
#pragma once

#include <cstdint>

struct CUstream_st;  // cudaStream_t is a pointer to this, so no CUDA header is needed here

namespace swiftspec {

using Stream = CUstream_st*;

namespace host {

// out[row, token] = bits(row_key(seed, stream, positions[row]), token); out is rows x vocab, contiguous.
void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab,
                uint32_t* out);

// Whether this CPU runs `linear` and `attention` (AVX-512 BF16).
bool has_bf16();

// out = epilogue(norm(x) W^T + bias) in bfloat16, sums in float32. One of the outputs is given.
struct LinearArgs {
  const uint16_t* x;         // [rows, k] bfloat16
  const uint16_t* norm;      // [k] bfloat16 weight of an RMSNorm in front, or null
  float eps;                 // of that norm
  const uint16_t* weight;    // packed [n / 16][k / 2][16][2] bfloat16
  const float* bias;         // [n], or null
  const uint16_t* residual;  // [rows, n] bfloat16, added to the rounded product; or null
  uint16_t* out;             // [rows, n] bfloat16; with swiglu [rows, n / 2]; or null
  float* logits;             // [rows, n] float32, or null
  bool swiglu;               // the first n / 2 outputs are gates of the others: SiLU(gate) * up
  int64_t rows, k, n;        // k is a multiple of 16, n of 16 (with swiglu of 32)
};
void linear(const LinearArgs& args);

// RoPE on q and k, append of k and v to the cache at each row's slot, masked attention. All bfloat16.
struct AttentionArgs {
  const uint16_t* qkv;   // [rows, (heads + 2 kv_heads) dim]
  const uint16_t* cos;   // [rows, dim]
  const uint16_t* sin;   // [rows, dim], negative in its first half
  const int64_t* slots;  // [rows]
  const uint8_t* mask;   // [rows, width], over the last `width` of the `length` slots in use; older ones are visible
  uint16_t* keys;        // [kv_heads, capacity, dim]
  uint16_t* values;      // the same
  uint16_t* out;         // [rows, heads dim]
  int64_t rows, heads, kv_heads, capacity, length, width;
  int dim;               // of a head, a multiple of 32, at most 256
};
void attention(const AttentionArgs& args);

// Per row of x [rows, vocab] float32: the k largest of log_softmax(x), largest first, and where they stand. None is above
// 0 or NaN; a row without k candidates is filled up with -inf.
void log_top_k(const float* x, int64_t rows, int64_t vocab, int64_t k, int64_t* tokens, float* values);

// Slot source[i] -> start + i, where source ascends and source[i] >= start + i. Any dtype: sizes are in bytes.
struct MoveArgs {
  uint8_t* region;        // layer 0 of one sequence: [kv_heads, capacity, slot_bytes]
  int64_t layer_stride;   // bytes from one layer to the next
  int64_t layers, kv_heads, capacity, slot_bytes;
  const int64_t* source;  // [count]
  int64_t count, start;
};
void move_kv(const MoveArgs& args);

}  // namespace host

namespace cuda {

void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab,
                uint32_t* out, Stream cuda_stream);

}  // namespace cuda

}  // namespace swiftspec
