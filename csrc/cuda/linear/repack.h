// Repacking of a checkpoint's matrix into tiles, word by word, in the layout of tiles.h. For host code and device code.
#pragma once

#include <cstdint>

#include "cuda/linear/tiles.h"

namespace swiftspec::cuda::tiles {

// A checkpoint's int4 matrix (Int4Weight in swiftspec/model/formats/int4.py), with groups of tiling.group.
struct Int4Source {
  const uint32_t* codes;  // [k, n / 8], nibble i of word c is output 8c + i
  const float* scales;    // [k / group, n]
  const uint32_t* zeros;  // [k / group, n / 8], packed like the codes
};

SWIFTSPEC_HD uint32_t nibble(const uint32_t* words, int64_t row, int64_t n, int64_t column) {
  return words[row * (n / 8) + column / 8] >> 4 * (column % 8) & 15u;
}

SWIFTSPEC_HD uint32_t int4_codes(const Tiling& t, const Int4Source& from, int strip, int64_t step, int lane, int f) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    const int64_t output = output_of(t, strip, f, fragment::a_row(lane, i % 4));
    const int64_t input = input_of(step, fragment::a_column(lane, i % 4) + i / 4);
    if (output >= 0 && input < t.k) word |= nibble(from.codes, input, t.n, output) << 4 * i;
  }
  return word;
}

SWIFTSPEC_HD uint32_t int4_group(const Tiling& t, const Int4Source& from, int strip, int64_t group, int row, int f) {
  const int64_t output = output_of(t, strip, f, row);
  if (output < 0 || group * t.group >= t.k) return 0;
  return pack_group(from.scales[group * t.n + output], nibble(from.zeros, group, t.n, output));
}

// Word `at` of the array of tiles.
SWIFTSPEC_HD uint32_t int4_word(const Tiling& t, const Int4Source& from, int64_t at) {
  const int words = t.tile_bytes / 4, word = static_cast<int>(at % words);
  const int64_t tile = at / words % t.tiles;
  const int strip = static_cast<int>(at / words / t.tiles);
  if (word < kCodeWords) {  // the inverse of code_word
    const int step = word / 128 * 2 + word % 4 / 2;
    return int4_codes(t, from, strip, tile * 8 + step, word / 4 % 32, word % 2);
  }
  const int i = word - kCodeWords;  // the inverse of group_words: [group][row of eight][fragment][upper half]
  return int4_group(t, from, strip, tile * t.groups() + i / 32, i / 4 % 8 + 8 * (i % 2), i / 2 % 2);
}

SWIFTSPEC_HD uint32_t bf16_word(const Tiling& t, const uint16_t* matrix, int64_t at) {
  const int words = t.tile_bytes / 4, word = static_cast<int>(at % words);  // below: the inverse of dense_word
  const int64_t tile = at / words % t.tiles;
  const int strip = static_cast<int>(at / words / t.tiles), i = word % 4, lane = word / 4 % 32;
  const int64_t output = output_of(t, strip, word / 128 % 2, fragment::a_row(lane, i));
  const int64_t input = input_of(tile * 4 + word / 256, fragment::a_column(lane, i));
  if (output < 0 || input >= t.k) return 0;  // k is even
  return static_cast<uint32_t>(matrix[output * t.k + input + 1]) << 16 | matrix[output * t.k + input];
}

}  // namespace swiftspec::cuda::tiles
