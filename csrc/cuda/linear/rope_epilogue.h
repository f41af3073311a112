// Epilogue of a QKV projection per lane: RoPE of queries and new keys, and the append of new keys and values to the cache.
// It has the bits of store_unit (lane_epilogue.h) followed by rope_append (attention/rope_append.h). A lane holds both
// elements of each rotation (tiles::with_heads). For host code and device code.
#pragma once

#include <cstdint>

#include "common/ieee.h"
#include "cuda/attention/key_lists.h"
#include "cuda/float8.h"
#include "cuda/linear/lane_epilogue.h"
#include "kernels_cuda.h"

namespace swiftspec::cuda {

// Where the lane's two rows of x go. If AttentionSetup::prepared, this and load_rope may be read before the wait for the
// previous kernel; see attention_kernel.
struct AppendedRows {
  int32_t position[2];
  int64_t line[2];  // slot of the first key-value head, counted over the whole cache of the layer
};
SWIFTSPEC_HD AppendedRows appended_rows(const AttentionSetup& a, int lane) {
  AppendedRows found{};
  SWIFTSPEC_UNROLL
  for (int e = 0; e < 2; ++e) {
    const int row = fragment::c_column(lane, e);
    if (row >= a.rows) continue;
    found.position[e] = static_cast<int32_t>(attention::load_uncached(a.positions + row));
    const int64_t slot = attention::load_uncached(a.slots + row);
    found.line[e] = attention::sequence_of(a, row) * a.kv_heads * a.capacity + slot;
  }
  return found;
}

// The part of a head that a unit computes for both rows: elements `at`, `at` + 1, and those half a head further on.
struct HeadPart {
  int32_t head, at;  // of all heads: queries, keys, values
};
SWIFTSPEC_HD HeadPart head_part(const tiles::Tiling& t, int strip, int lane) {
  const auto pair = static_cast<int32_t>(tiles::pair_of_outputs(strip, lane));
  return {pair >> (t.apart == 32 ? 5 : 6), pair & static_cast<int32_t>(t.apart - 1)};
}

// Entries of the tables for a unit, so that they can be loaded before the sums are there: pairs of neighbours.
struct RopePairs {
  uint32_t cos[2][2], sin[2][2];  // [second][row]
};
SWIFTSPEC_HD RopePairs load_rope(const tiles::Tiling& t, const AttentionSetup& a, const AppendedRows& rows, int strip,
                                 int lane) {
  const HeadPart part = head_part(t, strip, lane);
  RopePairs found{};
  if (part.head >= a.heads + a.kv_heads) return found;  // values, or padding
  SWIFTSPEC_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int64_t entry = rows.position[i % 2] * a.dim + part.at + i / 2 * t.apart;
    found.cos[i / 2][i % 2] = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(a.cos) + entry);
    found.sin[i / 2][i % 2] = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(a.sin) + entry);
  }
  return found;
}

// As attention::apply_rope, for two elements.
SWIFTSPEC_HD uint32_t rotated(uint32_t straight, uint32_t turned, uint32_t cos, uint32_t sin) {
  const float low = tiles::rounded(ieee::mul(tiles::low(straight), tiles::low(cos)));
  const float high = tiles::rounded(ieee::mul(tiles::high(straight), tiles::high(cos)));
  return tiles::pair_of(fmaf(tiles::low(turned), tiles::low(sin), low),
                        fmaf(tiles::high(turned), tiles::high(sin), high));
}

// Stores two neighbouring elements of the cache, from element `at` on.
SWIFTSPEC_HD void store_cached(void* cache, bool float8, int64_t at, uint32_t pair) {
  if (!float8) {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(cache) + at) = pair;
    return;
  }
  const uint32_t low = float8::nearest(tiles::low(pair)), high = float8::nearest(tiles::high(pair));
  *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(cache) + at) = static_cast<uint16_t>(high << 8 | low);
}

// Rounds a unit's sums and appends them.
SWIFTSPEC_HD void append_unit(const tiles::Tiling& t, const RopeAppend& to, const AppendedRows& rows,
                              const RopePairs& rope, int lane, const Unit& unit) {
  const AttentionSetup& a = to.setup;
  const HeadPart part = head_part(t, unit.strip, lane);
  const int heads = static_cast<int>(a.heads), kv_heads = static_cast<int>(a.kv_heads);
  if (part.head >= heads + 2 * kv_heads) return;  // padding
  const bool is_query = part.head < heads, is_value = part.head >= heads + kv_heads;
  const int kv_head = part.head - heads - (is_value ? kv_heads : 0);
  SWIFTSPEC_UNROLL
  for (int e = 0; e < 2; ++e) {
    const int row = fragment::c_column(lane, e);
    if (row >= a.rows) continue;
    const auto& v = unit.value;
    const uint32_t first = tiles::pair_of(v[0][e][0], v[0][e][1]), second = tiles::pair_of(v[1][e][0], v[1][e][1]);
    const int64_t line = is_query ? static_cast<int64_t>(row) * heads + part.head : rows.line[e] + kv_head * a.capacity;
    SWIFTSPEC_UNROLL
    for (int s = 0; s < 2; ++s) {
      const uint32_t straight = s == 0 ? first : second, turned = s == 0 ? second : first;
      const uint32_t pair = is_value ? straight : rotated(straight, turned, rope.cos[s][e], rope.sin[s][e]);
      void* const into = is_query ? a.queries : is_value ? to.values : to.keys;
      store_cached(into, !is_query && a.float8, line * a.dim + part.at + s * t.apart, pair);
    }
  }
}

}  // namespace swiftspec::cuda
