#include "host/pack/pack.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "common/bfloat16.h"
#include "common/ieee.h"
#include "host/ops/threads.h"

namespace swiftspec::host {

namespace {

constexpr int64_t kBlock = 16, kHalf = 8;           // outputs of a block
constexpr int kTileColumns = 16;                    // words of a tile's row
constexpr int64_t kTileRows = 64, kTileWords = 64;  // tile of one task, which stays in the cache
constexpr int kInOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr int kAwq[8] = {0, 2, 4, 6, 1, 3, 5, 7};     // output of each nibble of a 32-bit word
constexpr int kInputs[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // input of each nibble of a block's word

using Tile = uint32_t[8][kTileColumns];

void load(const uint32_t* from, int64_t count, uint32_t (&row)[kTileColumns]) {
  if (count == kTileColumns) {
    std::memcpy(row, from, sizeof row);
  } else {
    std::memcpy(row, from, static_cast<size_t>(count) * sizeof *row);
  }
}

// Swaps the upper parts of rows i with the lower parts of rows i + Distance.
template <int Distance, uint32_t Low, int Shift>
void swap_parts(Tile& tile) {
  for (int i = 0; i < 8; ++i) {
    if ((i & Distance) != 0) continue;
    for (int c = 0; c < kTileColumns; ++c) {
      const uint32_t a = tile[i][c], b = tile[i + Distance][c];
      tile[i][c] = (a & Low) | ((b & Low) << Shift);
      tile[i + Distance][c] = ((a >> Shift) & Low) | (b & ~Low);
    }
  }
}

// Transposes nibbles: swaps nibble j of row i with nibble i of row j, in every column.
void transpose_nibbles(Tile& tile) {
  swap_parts<4, 0x0000ffff, 16>(tile);
  swap_parts<2, 0x00ff00ff, 8>(tile);
  swap_parts<1, 0x0f0f0f0f, 4>(tile);
}

// Nibbles 0, 2, 4 and 6.
uint32_t gather_nibbles(uint32_t x) {
  x &= 0x0f0f0f0f;
  x = (x | (x >> 4)) & 0x00ff00ff;
  return (x | (x >> 8)) & 0x0000ffff;
}

// Reorders the codes of eight consecutive inputs to the order of a block's word: even inputs in the low half.
void reorder(Tile& tile) {
  for (auto& row : tile) {
    for (uint32_t& word : row) word = gather_nibbles(word) | (gather_nibbles(word >> 4) << 16);
  }
}

// Stores column c of the tile at to(c): row i becomes word order[i].
template <class To>
void scatter_columns(const Tile& tile, int64_t count, const int (&order)[8], const To& to) {
  const auto one = [&](int64_t c) {
    uint32_t* out = to(c);
    for (int i = 0; i < 8; ++i) out[order[i]] = tile[i][c];
  };
  if (count == kTileColumns) {
    for (int64_t c = 0; c < kTileColumns; ++c) one(c);
  } else {
    for (int64_t c = 0; c < count; ++c) one(c);
  }
}

// The address of the eight outputs from 8 `half` on, in blocks of `rows` rows of 16.
template <class T>
T* half_block(T* data, int64_t half, int64_t rows) {
  return data + half / 2 * rows * kBlock + half % 2 * kHalf;
}

// Packs rows k .. end of words of eight outputs.
void pack_by_outputs(const Int4Part& part, int64_t first, uint32_t* data, int64_t k, int64_t end, int64_t word,
                     int64_t last) {
  const int(&order)[8] = part.order == CodeOrder::awq ? kAwq : kInOrder;
  for (; k < end; k += 8) {
    for (int64_t w = word; w < last; w += kTileColumns) {
      const int64_t count = std::min<int64_t>(kTileColumns, last - w);
      Tile tile;
      for (int i = 0; i < 8; ++i) load(part.codes + (k + kInputs[i]) * part.row + w, count, tile[i]);
      transpose_nibbles(tile);
      scatter_columns(tile, count, order,
                      [&](int64_t c) { return half_block(data, first / kHalf + w + c, part.k / 8) + k / 8 * kBlock; });
    }
  }
}

// Packs eight rows of words, one per output, into their half of a block.
template <bool Reorder>
void pack_eight(const uint32_t* rows, int64_t num_rows, int64_t words, int64_t stride, uint32_t* out) {
  for (int64_t w = 0; w < words; w += kTileColumns) {
    const int64_t count = std::min<int64_t>(kTileColumns, words - w);
    Tile tile;
    for (int i = 0; i < 8; ++i) {
      if (i < num_rows) {
        load(rows + i * stride + w, count, tile[i]);
      } else {
        std::memset(tile[i], 0, sizeof tile[i]);
      }
    }
    if (Reorder) reorder(tile);
    scatter_columns(tile, count, kInOrder, [&](int64_t c) { return out + (w + c) * kBlock; });
  }
}

// Packs words of eight inputs, in rows of one 32-bit word per output: only the order of the nibbles changes.
void pack_gptq(const Int4Part& part, int64_t first, uint32_t* data) {
  parallel_for(part.n / kHalf, [&](int64_t half) {
    uint32_t* out = half_block(data, first / kHalf + half, part.k / 8);
    for (int64_t k = 0; k < part.k / 8; ++k, out += kBlock) {
      const uint32_t* row = part.codes + k * part.row + half * kHalf;
      for (int i = 0; i < kHalf; ++i) out[i] = gather_nibbles(row[i]) | gather_nibbles(row[i] >> 4) << 16;
    }
  });
}

template <class T>
void write_scales(const GroupedView& from, int64_t half, int64_t groups, T* out) {
  const T* scales = static_cast<const T*>(from.data) + half * kHalf * from.output;
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < kHalf; ++i) out[g * kBlock + i] = scales[g * from.group + i * from.output];
  }
}

void write_zeros(const Int4Part& part, int64_t half, int64_t groups, uint8_t* out) {
  const int(&order)[8] = part.order == CodeOrder::awq ? kAwq : kInOrder;
  const auto* words = static_cast<const uint32_t*>(part.zeros.data);
  for (int64_t g = 0; g < groups; ++g) {
    const uint32_t word = words == nullptr ? 0x88888888 : words[g * part.zeros.group + half * part.zeros.output];
    for (int i = 0; i < 8; ++i) out[g * kBlock + order[i]] = static_cast<uint8_t>(word >> (4 * i) & 15);
  }
}

void write_groups(const Int4Part& part, int64_t first, int64_t half, int64_t scale_bytes, void* scales,
                  uint8_t* zeros) {
  const int64_t groups = part.k / part.group, at = first / kHalf + half;
  if (scale_bytes == 2) {
    write_scales(part.scales, half, groups, half_block(static_cast<uint16_t*>(scales), at, groups));
  } else {
    write_scales(part.scales, half, groups, half_block(static_cast<uint32_t*>(scales), at, groups));
  }
  write_zeros(part, half, groups, half_block(zeros, at, groups));
}

float to_float(float x) { return x; }
float to_float(uint16_t x) { return bf16::widen(x); }

// Quantises up to sixteen rows of one group to int8: one scale per row, bytes in the order of a block.
template <class X>
void quantize_group(const X* rows, int64_t num_rows, int64_t stride, int64_t group, uint32_t* data, uint16_t* scales) {
  constexpr int kBytePosition[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // byte order 0 4 1 5 2 6 3 7
  uint8_t bytes[kBlock][128];
  float values[128];
  std::memset(bytes, 128, sizeof bytes);
  for (int64_t r = 0; r < kBlock; ++r) {
    scales[r] = 0;
    if (r >= num_rows) continue;
    float top = 0.0f, num_nan = 0.0f;
    for (int64_t i = 0; i < group; ++i) values[i] = to_float(rows[r * stride + i]);
    for (int64_t i = 0; i < group; ++i) top = std::max(top, ieee::of_bits(ieee::bits_of(values[i]) & 0x7fffffff));
    for (int64_t i = 0; i < group; ++i) num_nan += values[i] != values[i] ? 1.0f : 0.0f;
    scales[r] = bf16::nearest(num_nan > 0.0f ? std::numeric_limits<float>::quiet_NaN() : top / 127.0f);
    const float scale = bf16::widen(scales[r]), inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (int64_t i = 0; i < group; ++i) {
      const float scaled = std::min(std::max(values[i] * inverse, -127.0f), 127.0f);
      const float even = scaled + 12582912.0f;  // adding 1.5 * 2^23 rounds to the nearest integer, ties to even
      const auto code = static_cast<uint8_t>(ieee::bits_of(even));
      bytes[r][i / 8 * 8 + kBytePosition[i % 8]] = static_cast<uint8_t>(code ^ 128);
    }
  }
  for (int64_t w = 0; w < group / 4; ++w) {
    for (int64_t r = 0; r < kBlock; ++r) std::memcpy(data + w * kBlock + r, bytes[r] + 4 * w, 4);
  }
}

template <class X>
void quantize_rows(const X* rows, int64_t n, int64_t k, int64_t stride, int64_t group, uint32_t* data,
                   uint16_t* scales) {
  const int64_t groups = k / group;
  parallel_for((n + kBlock - 1) / kBlock, [&](int64_t block) {
    const int64_t row = block * kBlock, num_rows = std::min(kBlock, n - row);
    for (int64_t g = 0; g < groups; ++g) {
      quantize_group(rows + row * stride + g * group, num_rows, stride, group,
                     data + (block * k / 4 + g * group / 4) * kBlock, scales + (block * groups + g) * kBlock);
    }
  });
}

uint64_t rotate_left(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

// Checksum of eight independent lanes. Each step is a bijection of the word, so every single changed bit is detected.
uint64_t checksum(const uint8_t* data, int64_t bytes) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15, kOther = 0xc2b2ae3d27d4eb4f;
  uint64_t lanes[8];
  for (int i = 0; i < 8; ++i) lanes[i] = kOther * static_cast<uint64_t>(i + 1) + static_cast<uint64_t>(bytes);
  const auto take = [&](const uint8_t* from) {
    for (int i = 0; i < 8; ++i) {
      uint64_t word;
      std::memcpy(&word, from + 8 * i, sizeof word);
      lanes[i] = rotate_left(lanes[i] ^ word, 29) * kOdd;
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
  for (const uint64_t value : lanes) sum = rotate_left(sum ^ (value ^ (value >> 32)), 29) * kOther;
  return sum ^ (sum >> 29);
}

}  // namespace

void pack_int4(const Int4Part& part, int64_t first, int64_t scale_bytes, uint32_t* data, void* scales, uint8_t* zeros) {
  const int64_t halves = part.n / kHalf;
  if (part.order == CodeOrder::inputs) {
    parallel_for(halves, [&](int64_t half) {
      pack_eight<true>(part.codes + half * kHalf * part.row, kHalf, part.k / 8, part.row,
                       half_block(data, first / kHalf + half, part.k / 8));
    });
  } else if (part.order == CodeOrder::gptq) {
    pack_gptq(part, first, data);
  } else {
    const int64_t across = (halves + kTileWords - 1) / kTileWords, down = (part.k + kTileRows - 1) / kTileRows;
    parallel_for(across * down, [&](int64_t piece) {
      const int64_t k = piece / across * kTileRows, word = piece % across * kTileWords;
      pack_by_outputs(part, first, data, k, std::min(part.k, k + kTileRows), word, std::min(halves, word + kTileWords));
    });
  }
  parallel_for(halves, [&](int64_t half) { write_groups(part, first, half, scale_bytes, scales, zeros); });
}

void pack_rows(const uint32_t* rows, int64_t n, int64_t words, int64_t stride, uint32_t* out) {
  parallel_for((n + kBlock - 1) / kBlock * 2, [&](int64_t half) {
    const int64_t row = half * kHalf, num_rows = std::clamp<int64_t>(n - row, 0, kHalf);
    pack_eight<false>(rows + row * stride, num_rows, words, stride, half_block(out, half, words));
  });
}

void pack_int8(const void* rows, bool is_f32, int64_t n, int64_t k, int64_t stride, int64_t group, uint32_t* data,
               uint16_t* scales) {
  if (is_f32) return quantize_rows(static_cast<const float*>(rows), n, k, stride, group, data, scales);
  quantize_rows(static_cast<const uint16_t*>(rows), n, k, stride, group, data, scales);
}

void checksums(const uint8_t* data, int64_t bytes, uint64_t* sums) {
  parallel_for((bytes + kChecksumBlockBytes - 1) / kChecksumBlockBytes, [&](int64_t piece) {
    const int64_t at = piece * kChecksumBlockBytes;
    sums[piece] = checksum(data + at, std::min(kChecksumBlockBytes, bytes - at));
  });
}

}  // namespace swiftspec::host
