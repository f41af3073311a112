// What precedes attention in a layer: RoPE of queries and new keys, and the append of new keys and values to the cache.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/ieee.h"
#include "cuda/attention/key_lists.h"
#include "cuda/float8.h"
#include "cuda/mma.h"
#include "kernels_cuda.h"

namespace swiftspec::attention {

using bf16::Vec8;

// Entries of the tables for eight elements of a head; `sin` includes the sign of the rotation.
struct RopeFactors {
  Vec8 cos, sin;
};

template <int kDim>
SWIFTSPEC_HD RopeFactors rope_factors(const AttentionSetup& a, int row, int at) {
  const int64_t table = load_uncached(a.positions + row) * kDim + at;
  return {*reinterpret_cast<const Vec8*>(static_cast<const uint16_t*>(a.cos) + table),
          *reinterpret_cast<const Vec8*>(static_cast<const uint16_t*>(a.sin) + table)};
}

// Eight elements, from `at` on, of a head x [kDim] after RoPE: x cos + half_rotation(x) sin. Rounds where the reference
// rounds.
template <int kDim>
SWIFTSPEC_HD Vec8 apply_rope(const RopeFactors& factors, const uint16_t* x, int at) {
  const Vec8 straight = *reinterpret_cast<const Vec8*>(x + at);
  const Vec8 turned = *reinterpret_cast<const Vec8*>(x + (at + kDim / 2) % kDim);
  Vec8 out;
  for (int i = 0; i < 8; ++i) {
    const float cos = bf16::widen(factors.cos.x[i]), sin = bf16::widen(factors.sin.x[i]);
    const float first = bf16::widen(mma::nearest_bf16(ieee::mul(bf16::widen(straight.x[i]), cos)));
    out.x[i] = mma::nearest_bf16(fmaf(bf16::widen(turned.x[i]), sin, first));
  }
  return out;
}

// Stores eight elements in the type of the cache.
SWIFTSPEC_HD void store_vector(uint16_t* to, const Vec8& chunk) { *reinterpret_cast<Vec8*>(to) = chunk; }
SWIFTSPEC_HD void store_vector(uint8_t* to, const Vec8& chunk) {
  *reinterpret_cast<float8::Vec8*>(to) = float8::nearest(chunk);
}

// Number of pieces of eight elements in a row of qkv.
SWIFTSPEC_HD int row_pieces(const AttentionSetup& a) {
  return static_cast<int>((a.heads + 2 * a.kv_heads) * a.dim) / 8;
}

// Piece i of a row of qkv [rows, (heads + 2 kv_heads) kDim]: of a query, which goes to a.queries after RoPE, of a key,
// which goes to the cache after RoPE, or of a value. If several rows have the same slot, any of them may win: they are
// copies of each other, or no row reads them. `await_previous` waits for the kernel that writes qkv; before that, slot,
// position and tables are read.
template <int kDim, class Stored, class Await>
SWIFTSPEC_HD void rope_append(const AttentionSetup& a, const uint16_t* qkv, Stored* keys, Stored* values, int row,
                              int i, Await await_previous) {
  const int heads = static_cast<int>(a.heads), kv_heads = static_cast<int>(a.kv_heads);
  const int head = i / (kDim / 8), at = i % (kDim / 8) * 8;
  const uint16_t* x = qkv + (static_cast<int64_t>(row) * (heads + 2 * kv_heads) + head) * kDim;
  const bool is_value = head >= heads + kv_heads;
  const int64_t sequence = sequence_of(a, row), slot = load_uncached(a.slots + row);
  const RopeFactors factors = is_value ? RopeFactors{} : rope_factors<kDim>(a, row, at);
  await_previous();
  const Vec8 piece = is_value ? *reinterpret_cast<const Vec8*>(x + at) : apply_rope<kDim>(factors, x, at);
  if (head < heads) {
    return store_vector(a.queries + (static_cast<int64_t>(row) * heads + head) * kDim + at, piece);
  }
  const int64_t line = sequence * kv_heads + head - heads - (is_value ? kv_heads : 0);
  store_vector((is_value ? values : keys) + (line * a.capacity + slot) * kDim + at, piece);
}

}  // namespace swiftspec::attention
