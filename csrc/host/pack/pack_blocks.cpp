// Packs GGML's quantised blocks (ggml-common.h of llama.cpp has their layouts). Codes are read as 64-bit words of eight
// bytes, the lowest byte being the first input.
#include <cstring>

#include "host/ops/threads.h"
#include "host/pack/pack.h"

namespace swiftspec::host {

namespace {

constexpr int64_t kBlock = 16;  // outputs of a block
constexpr uint64_t kLowNibbles = 0x0f0f0f0f0f0f0f0f, kHighBits = 0x8080808080808080;
constexpr int kSuperGroups = 8;  // groups of 32 inputs in a block of 256

uint64_t load_eight(const uint8_t* p) {
  uint64_t eight;
  std::memcpy(&eight, p, sizeof eight);
  return eight;
}

uint16_t load_half(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half;
}

// Packs eight nibbles, one per byte: the even bytes in the low half of the result, the odd ones in the high half.
uint32_t word_of_nibbles(uint64_t eight) {
  const auto gather = [](uint64_t x) {
    x &= 0x000f000f000f000f;
    x = (x | x >> 12) & 0x000000ff000000ff;
    return static_cast<uint32_t>((x | x >> 24) & 0xffff);
  };
  return gather(eight) | gather(eight >> 8) << 16;
}

// Where one output of a matrix is packed: words and values of groups are 16 elements apart.
struct Lane {
  uint32_t* words;
  void* scales;
  void* minima;  // or null
  uint16_t* super_scales;
  uint16_t* super_minima;

  void store_int4(uint64_t eight) {
    *words = word_of_nibbles(eight);
    words += kBlock;
  }
  void store_int8(uint64_t eight) {  // bytes with a zero of 128; 0 4 1 5 are those of one word, 2 6 3 7 of the next
    const auto spread = [](uint64_t x) {
      x = (x | x << 16) & 0x0000ffff0000ffff;
      return (x | x << 8) & 0x00ff00ff00ff00ff;
    };
    const uint64_t both = spread(eight & 0xffffffff) | spread(eight >> 32) << 8;
    words[0] = static_cast<uint32_t>(both);
    words[kBlock] = static_cast<uint32_t>(both >> 32);
    words += 2 * kBlock;
  }
  template <class T>
  static void store_value(void*& at, T value) {
    *static_cast<T*>(at) = value;
    at = static_cast<T*>(at) + kBlock;
  }
};

// Sixteen bytes of nibbles: the low ones are those of the first sixteen inputs.
void store_nibbles(const uint8_t* from, Lane& to) {
  for (const int shift : {0, 4}) {
    for (const int half : {0, 8}) to.store_int4(load_eight(from + half) >> shift & kLowNibbles);
  }
}

struct Q4_0 {
  static constexpr int64_t kInputs = 32, kBytes = 18, kGroup = 32, kBits = 4, kScaleBytes = 2;
  static constexpr bool kMinima = false, kSignedScales = false;
  static void pack(const uint8_t* from, Lane& to) {
    Lane::store_value(to.scales, load_half(from));
    store_nibbles(from + 2, to);
  }
};

struct Q4_1 {
  static constexpr int64_t kInputs = 32, kBytes = 20, kGroup = 32, kBits = 4, kScaleBytes = 2;
  static constexpr bool kMinima = true, kSignedScales = false;
  static void pack(const uint8_t* from, Lane& to) {
    Lane::store_value(to.scales, load_half(from));
    Lane::store_value(to.minima, load_half(from + 2));
    store_nibbles(from + 4, to);
  }
};

struct Q8_0 {
  static constexpr int64_t kInputs = 32, kBytes = 34, kGroup = 32, kBits = 8, kScaleBytes = 2;
  static constexpr bool kMinima = false, kSignedScales = false;
  static void pack(const uint8_t* from, Lane& to) {
    Lane::store_value(to.scales, load_half(from));
    for (int i = 0; i < 32; i += 8) to.store_int8(load_eight(from + 2 + i) ^ kHighBits);
  }
};

// Stores the scales and minima of the eight groups of a block of Q4_K or Q5_K: two halves, then twelve bytes with six
// bits of each. Minima are subtracted, so their super-scale changes its sign.
void store_super_groups(const uint8_t* from, Lane& to) {
  *to.super_scales = load_half(from);
  *to.super_minima = load_half(from + 2) ^ 0x8000;
  to.super_scales += kBlock, to.super_minima += kBlock;
  const uint8_t* q = from + 4;
  for (int j = 0; j < kSuperGroups; ++j) {
    const int scale = j < 4 ? q[j] & 63 : (q[j + 4] & 15) | q[j - 4] >> 6 << 4;
    const int minimum = j < 4 ? q[j + 4] & 63 : q[j + 4] >> 4 | q[j] >> 6 << 4;
    Lane::store_value(to.scales, static_cast<uint8_t>(scale));
    Lane::store_value(to.minima, static_cast<uint8_t>(minimum));
  }
}

struct Q4_K {
  static constexpr int64_t kInputs = 256, kBytes = 144, kGroup = 32, kBits = 4, kScaleBytes = 1;
  static constexpr bool kMinima = true, kSignedScales = false;
  static void pack(const uint8_t* from, Lane& to) {
    store_super_groups(from, to);
    for (const uint8_t* codes = from + 16; codes != from + kBytes; codes += 32) {
      for (const int shift : {0, 4}) {
        for (int i = 0; i < 32; i += 8) to.store_int4(load_eight(codes + i) >> shift & kLowNibbles);
      }
    }
  }
};

struct Q5_K {
  static constexpr int64_t kInputs = 256, kBytes = 176, kGroup = 32, kBits = 8, kScaleBytes = 1;
  static constexpr bool kMinima = true, kSignedScales = false;
  static void pack(const uint8_t* from, Lane& to) {
    store_super_groups(from, to);
    const uint8_t *high = from + 16, *codes = from + 48;
    for (int j = 0; j < kSuperGroups; ++j) {
      for (int i = 0; i < 32; i += 8) {
        const uint64_t low = load_eight(codes + j / 2 * 32 + i) >> (j % 2 * 4) & kLowNibbles;
        const uint64_t fifth = load_eight(high + i) >> j & 0x0101010101010101;
        to.store_int8((low | fifth << 4) ^ kHighBits);
      }
    }
  }
};

struct Q6_K {
  static constexpr int64_t kInputs = 256, kBytes = 210, kGroup = 16, kBits = 8, kScaleBytes = 1;
  static constexpr bool kMinima = false, kSignedScales = true;
  static void pack(const uint8_t* from, Lane& to) {
    *to.super_scales = load_half(from + 208);
    to.super_scales += kBlock;
    for (int j = 0; j < 16; ++j) Lane::store_value(to.scales, from[192 + j]);
    for (int j = 0; j < kSuperGroups; ++j) {  // groups of 32 inputs
      const uint8_t *low = from + j / 4 * 64 + j % 2 * 32, *high = from + 128 + j / 4 * 32;
      for (int i = 0; i < 32; i += 8) {
        const uint64_t four = load_eight(low + i) >> (j % 4 / 2 * 4) & kLowNibbles;
        const uint64_t two = load_eight(high + i) >> (j % 4 * 2) & 0x0303030303030303;
        to.store_int8((four | two << 4) + 0x6060606060606060);  // the code less 32, plus 128
      }
    }
  }
};

template <class Kind>
void pack_kind(const BlockPart& part, int64_t first, const BlockTargets& to) {
  const int64_t words = part.k * Kind::kBits / 32, groups = part.k / Kind::kGroup;
  const int64_t supers = Kind::kScaleBytes == 1 ? part.k / Kind::kInputs : 0;
  const int64_t begin = first / kBlock, end = (first + part.n + kBlock - 1) / kBlock;
  parallel_for(end - begin, [&](int64_t index) {
    const int64_t block = begin + index;
    for (int64_t lane = 0; lane < kBlock; ++lane) {
      const int64_t row = block * kBlock + lane - first;
      if (row < 0 || row >= part.n) continue;
      const int64_t at = block * groups * kBlock + lane;
      Lane out{to.data + block * words * kBlock + lane, static_cast<uint8_t*>(to.scales) + at * Kind::kScaleBytes,
               Kind::kMinima ? static_cast<uint8_t*>(to.minima) + at * Kind::kScaleBytes : nullptr,
               to.super_scales + supers * block * kBlock + lane, to.super_minima + supers * block * kBlock + lane};
      const uint8_t* from = part.rows + row * part.stride;
      for (int64_t k = 0; k < part.k; k += Kind::kInputs, from += Kind::kBytes) Kind::pack(from, out);
    }
  });
}

template <class Kind>
constexpr BlockLayout layout_of() {
  return {Kind::kInputs, Kind::kBytes, Kind::kGroup, Kind::kBits, Kind::kScaleBytes, Kind::kSignedScales,
          Kind::kMinima, &pack_kind<Kind>};
}

}  // namespace

std::optional<BlockLayout> block_layout(const std::string& name) {
  if (name == "Q4_0") return layout_of<Q4_0>();
  if (name == "Q4_1") return layout_of<Q4_1>();
  if (name == "Q8_0") return layout_of<Q8_0>();
  if (name == "Q4_K") return layout_of<Q4_K>();
  if (name == "Q5_K") return layout_of<Q5_K>();
  if (name == "Q6_K") return layout_of<Q6_K>();
  return {};
}

}  // namespace swiftspec::host
