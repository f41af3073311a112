// Unpacking of tiles to rows [k] of bfloat16 for a library GEMM: worth its cost for prompts, which have many rows. For
// host code and device code.
#pragma once

#include <cstdint>

#include "cuda/linear/tiles.h"

namespace swiftspec::cuda::tiles {

// A range of strips. Their outputs are written in two halves: the `first` outputs of all strips, then the `second`. Those
// of whole heads are written in their order.
struct Strips {
  int32_t first, count;
  int64_t half;  // outputs per half; the last strip may be partly padding

  SWIFTSPEC_HD int32_t tiles(const Tiling& t) const { return count * t.tiles; }
};

// The strips that hold outputs 16 first .. 16 first + half - 1 and those half of all outputs further on.
SWIFTSPEC_HD Strips strips_of(int64_t first, int64_t half) {
  return {static_cast<int32_t>(first), static_cast<int32_t>(ceil_div(half, kStrip / 2)), half};
}

struct alignas(16) Bf16x8 {
  uint32_t pairs[4];
};

// Dequantises eight inputs of one output from a lane's codes of both steps of a block: (code - zero) scale, rounded
// once. `upper` is 1 for row lane / 4 + 8.
SWIFTSPEC_HD Bf16x8 dequantize8(uint32_t even, uint32_t odd, uint32_t group_word, int upper) {
  const float scale = scale_of(group_word), offset = offset_of(group_word);
  Bf16x8 out;
  SWIFTSPEC_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = codes_to_bf16(i < 2 ? even : odd, upper + i % 2 * 2);
    out.pairs[i] = pair_of((low(pair) - offset) * scale, (high(pair) - offset) * scale);
  }
  return out;
}

// Unpacks one lane's share of tile `at` of these strips: eight inputs of four outputs in every block. out: [2 half, k].
template <bool kInt4>
SWIFTSPEC_HD void unpack_tile(const Tiling& t, const uint32_t* tiles, const Strips& strips, int at, int lane,
                              uint16_t* out) {
  constexpr int kBlocks = kInt4 ? 4 : 2;
  const int strip = at / t.tiles, tile = at % t.tiles;
  const uint32_t* words = tiles + t.tile_at(strips.first + strip, tile) / 4;
  Tiling written = t;
  if (t.heads == 0) written.apart = strips.half;
  SWIFTSPEC_UNROLL
  for (int i = 0; i < 4 * kBlocks; ++i) {
    const int block = i / 4, f = i / 2 % 2, upper = i % 2;
    const int64_t pair = 16 * static_cast<int64_t>(strip) + 2 * (lane / 4) + f;
    const int64_t input = static_cast<int64_t>(tile) * t.tile_k + x_input(block, lane);
    if (pair >= strips.half || input >= t.k) continue;  // k is a multiple of 8
    Bf16x8 values;
    if constexpr (kInt4) {
      const uint32_t group = words[group_words(block >> t.group_log, lane) + 2 * f + upper];
      values =
          dequantize8(words[code_word(2 * block, lane, f)], words[code_word(2 * block + 1, lane, f)], group, upper);
    } else {
      SWIFTSPEC_UNROLL
      for (int p = 0; p < 4; ++p) values.pairs[p] = words[dense_word(2 * block + p / 2, lane, f, upper + p % 2 * 2)];
    }
    *reinterpret_cast<Bf16x8*>(out + output_of_pair(written, pair, upper) * t.k + input) = values;
  }
}

}  // namespace swiftspec::cuda::tiles
