#include "host/pack/pack.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "common/bfloat16.h"
#include "common/ieee.h"
#include "host/ops/threads.h"

namespace swiftspec::host {

namespace {

constexpr int64_t kBlock = 16, kHalf = 8;       // outputs of a block
constexpr int kWide = 16;                       // words of a tile's row
constexpr int64_t kTileRows = 64, kTileWords = 64;  // of one piece of work: what it reads and writes stays in the cache
constexpr int kInOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr int kAwq[8] = {0, 2, 4, 6, 1, 3, 5, 7};     // nibble i of a word is this output
constexpr int kInputs[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // nibble i of a block's word is this input

using Tile = uint32_t[8][kWide];

void load(const uint32_t* from, int64_t count, uint32_t (&row)[kWide]) {
  if (count == kWide) {
    std::memcpy(row, from, sizeof row);
  } else {
    std::memcpy(row, from, static_cast<size_t>(count) * sizeof *row);
  }
}

// Swaps the upper part of each row of the first half with the lower part of its partner in the second.
template <int Distance, uint32_t Low, int Shift>
void swap_parts(Tile& tile) {
  for (int i = 0; i < 8; ++i) {
    if ((i & Distance) != 0) continue;
    for (int c = 0; c < kWide; ++c) {
      const uint32_t a = tile[i][c], b = tile[i + Distance][c];
      tile[i][c] = (a & Low) | ((b & Low) << Shift);
      tile[i + Distance][c] = ((a >> Shift) & Low) | (b & ~Low);
    }
  }
}

// Nibble j of row i and nibble i of row j change places, in every column.
void transpose_nibbles(Tile& tile) {
  swap_parts<4, 0x0000ffff, 16>(tile);
  swap_parts<2, 0x00ff00ff, 8>(tile);
  swap_parts<1, 0x0f0f0f0f, 4>(tile);
}

// The codes of eight inputs, in order, as a block's word has them: even ones in the low half.
void reorder(Tile& tile) {
  const auto gather = [](uint32_t x) {  // the nibbles 0, 2, 4 and 6
    x &= 0x0f0f0f0f;
    x = (x | (x >> 4)) & 0x00ff00ff;
    return (x | (x >> 8)) & 0x0000ffff;
  };
  for (auto& row : tile) {
    for (uint32_t& word : row) word = gather(word) | (gather(word >> 4) << 16);
  }
}

// Column c of the tile goes to to(c): eight words, of which row i is the one at order[i].
template <class To>
void put(const Tile& tile, int64_t count, const int (&order)[8], const To& to) {
  const auto one = [&](int64_t c) {
    uint32_t* out = to(c);
    for (int i = 0; i < 8; ++i) out[order[i]] = tile[i][c];
  };
  if (count == kWide) {
    for (int64_t c = 0; c < kWide; ++c) one(c);
  } else {
    for (int64_t c = 0; c < count; ++c) one(c);
  }
}

// Where the eight outputs from 8 `half` on are, of blocks of so many rows of 16.
template <class T>
T* half_block(T* data, int64_t half, int64_t rows) {
  return data + half / 2 * rows * kBlock + half % 2 * kHalf;
}

// Rows [K], words of eight outputs.
void pack_by_outputs(const Int4Part& part, int64_t first, uint32_t* data, int64_t k, int64_t end, int64_t word,
                     int64_t last) {
  const int(&order)[8] = part.order == Codes::awq ? kAwq : kInOrder;
  for (; k < end; k += 8) {
    for (int64_t w = word; w < last; w += kWide) {
      const int64_t count = std::min<int64_t>(kWide, last - w);
      Tile tile;
      for (int i = 0; i < 8; ++i) load(part.codes + (k + kInputs[i]) * part.row + w, count, tile[i]);
      transpose_nibbles(tile);
      put(tile, count, order,
          [&](int64_t c) { return half_block(data, first / kHalf + w + c, part.k / 8) + k / 8 * kBlock; });
    }
  }
}

// Eight rows of words, one an output, to their half of a block.
template <bool Reorder>
void pack_eight(const uint32_t* rows, int64_t here, int64_t words, int64_t stride, uint32_t* out) {
  for (int64_t w = 0; w < words; w += kWide) {
    const int64_t count = std::min<int64_t>(kWide, words - w);
    Tile tile;
    for (int i = 0; i < 8; ++i) {
      if (i < here) {
        load(rows + i * stride + w, count, tile[i]);
      } else {
        std::memset(tile[i], 0, sizeof tile[i]);
      }
    }
    if (Reorder) reorder(tile);
    put(tile, count, kInOrder, [&](int64_t c) { return out + (w + c) * kBlock; });
  }
}

template <class T>
void put_scales(const Grouped& from, int64_t half, int64_t groups, T* out) {
  const T* scales = static_cast<const T*>(from.data) + half * kHalf * from.output;
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < kHalf; ++i) out[g * kBlock + i] = scales[g * from.group + i * from.output];
  }
}

void put_zeros(const Int4Part& part, int64_t half, int64_t groups, uint8_t* out) {
  const int(&order)[8] = part.order == Codes::awq ? kAwq : kInOrder;
  const auto* words = static_cast<const uint32_t*>(part.zeros.data);
  for (int64_t g = 0; g < groups; ++g) {
    const uint32_t word = words == nullptr ? 0x88888888 : words[g * part.zeros.group + half * part.zeros.output];
    for (int i = 0; i < 8; ++i) out[g * kBlock + order[i]] = static_cast<uint8_t>(word >> (4 * i) & 15);
  }
}

void put_grouped(const Int4Part& part, int64_t first, int64_t half, int64_t scale_bytes, void* scales, uint8_t* zeros) {
  const int64_t groups = part.k / part.group, at = first / kHalf + half;
  if (scale_bytes == 2) {
    put_scales(part.scales, half, groups, half_block(static_cast<uint16_t*>(scales), at, groups));
  } else {
    put_scales(part.scales, half, groups, half_block(static_cast<uint32_t*>(scales), at, groups));
  }
  put_zeros(part, half, groups, half_block(zeros, at, groups));
}

float number(float x) { return x; }
float number(uint16_t x) { return bf16::widen(x); }

// Up to sixteen rows of one group: a scale each, and their bytes as a block has them.
template <class X>
void round_group(const X* rows, int64_t here, int64_t stride, int64_t group, uint32_t* data, uint16_t* scales) {
  constexpr int kPlace[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // of each of eight inputs: 0 4 1 5 2 6 3 7 follow each other
  uint8_t bytes[kBlock][128];
  float values[128];
  std::memset(bytes, 128, sizeof bytes);
  for (int64_t r = 0; r < kBlock; ++r) {
    scales[r] = 0;
    if (r >= here) continue;
    float top = 0.0f, spoilt = 0.0f;
    for (int64_t i = 0; i < group; ++i) values[i] = number(rows[r * stride + i]);
    for (int64_t i = 0; i < group; ++i) top = std::max(top, ieee::of_bits(ieee::bits_of(values[i]) & 0x7fffffff));
    for (int64_t i = 0; i < group; ++i) spoilt += values[i] != values[i] ? 1.0f : 0.0f;
    scales[r] = bf16::nearest(spoilt > 0.0f ? std::numeric_limits<float>::quiet_NaN() : top / 127.0f);
    const float scale = bf16::widen(scales[r]), inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (int64_t i = 0; i < group; ++i) {
      const float scaled = std::min(std::max(values[i] * inverse, -127.0f), 127.0f);
      const float even = scaled + 12582912.0f;  // whose last bit is worth one: rounds to the nearest, ties to even
      bytes[r][i / 8 * 8 + kPlace[i % 8]] = static_cast<uint8_t>(static_cast<uint8_t>(ieee::bits_of(even)) ^ 128);
    }
  }
  for (int64_t w = 0; w < group / 4; ++w) {
    for (int64_t r = 0; r < kBlock; ++r) std::memcpy(data + w * kBlock + r, bytes[r] + 4 * w, 4);
  }
}

template <class X>
void round_rows(const X* rows, int64_t n, int64_t k, int64_t stride, int64_t group, uint32_t* data, uint16_t* scales) {
  const int64_t groups = k / group;
  share((n + kBlock - 1) / kBlock, [&](int64_t block) {
    const int64_t row = block * kBlock, here = std::min(kBlock, n - row);
    for (int64_t g = 0; g < groups; ++g) {
      round_group(rows + row * stride + g * group, here, stride, group, data + (block * k / 4 + g * group / 4) * kBlock,
                  scales + (block * groups + g) * kBlock);
    }
  });
}

uint64_t rotated(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

// Eight chains, each of which goes on to another value for another word, whatever came before: one changed bit is
// always seen.
uint64_t sum_of(const uint8_t* data, int64_t bytes) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15, kOther = 0xc2b2ae3d27d4eb4f;
  uint64_t chain[8];
  for (int i = 0; i < 8; ++i) chain[i] = kOther * static_cast<uint64_t>(i + 1) + static_cast<uint64_t>(bytes);
  const auto take = [&](const uint8_t* from) {
    for (int i = 0; i < 8; ++i) {
      uint64_t word;
      std::memcpy(&word, from + 8 * i, sizeof word);
      chain[i] = rotated(chain[i] ^ word, 29) * kOdd;
    }
  };
  const int64_t whole = bytes / 64 * 64;
  for (int64_t at = 0; at < whole; at += 64) take(data + at);
  if (whole != bytes) {
    uint8_t rest[64] = {};
    std::memcpy(rest, data + whole, static_cast<size_t>(bytes - whole));
    take(rest);
  }
  uint64_t sum = 0;
  for (const uint64_t value : chain) sum = rotated(sum ^ (value ^ (value >> 32)), 29) * kOther;
  return sum ^ (sum >> 29);
}

}  // namespace

void pack_int4(const Int4Part& part, int64_t first, int64_t scale_bytes, uint32_t* data, void* scales, uint8_t* zeros) {
  const int64_t halves = part.n / kHalf;
  if (part.order == Codes::inputs) {
    share(halves, [&](int64_t half) {
      pack_eight<true>(part.codes + half * kHalf * part.row, kHalf, part.k / 8, part.row,
                       half_block(data, first / kHalf + half, part.k / 8));
    });
  } else {
    const int64_t across = (halves + kTileWords - 1) / kTileWords, down = (part.k + kTileRows - 1) / kTileRows;
    share(across * down, [&](int64_t piece) {
      const int64_t k = piece / across * kTileRows, word = piece % across * kTileWords;
      pack_by_outputs(part, first, data, k, std::min(part.k, k + kTileRows), word, std::min(halves, word + kTileWords));
    });
  }
  share(halves, [&](int64_t half) { put_grouped(part, first, half, scale_bytes, scales, zeros); });
}

void pack_rows(const uint32_t* rows, int64_t n, int64_t words, int64_t stride, uint32_t* out) {
  share((n + kBlock - 1) / kBlock * 2, [&](int64_t half) {
    const int64_t row = half * kHalf, here = std::clamp<int64_t>(n - row, 0, kHalf);
    pack_eight<false>(rows + row * stride, here, words, stride, half_block(out, half, words));
  });
}

void pack_rounded(const void* rows, bool wide, int64_t n, int64_t k, int64_t stride, int64_t group, uint32_t* data,
                  uint16_t* scales) {
  if (wide) return round_rows(static_cast<const float*>(rows), n, k, stride, group, data, scales);
  round_rows(static_cast<const uint16_t*>(rows), n, k, stride, group, data, scales);
}

void sums_of(const uint8_t* data, int64_t bytes, uint64_t* sums) {
  share((bytes + kSumPiece - 1) / kSumPiece, [&](int64_t piece) {
    const int64_t at = piece * kSumPiece;
    sums[piece] = sum_of(data + at, std::min(kSumPiece, bytes - at));
  });
}

}  // namespace swiftspec::host
