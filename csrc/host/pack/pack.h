// Repacks weights from checkpoint layouts into the blocks of 16 outputs that `linear` reads (host/ops/product.h), on
// all threads. A matrix may be packed in parts; each part fills the outputs from `first` on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels_host.h"

namespace swiftspec::host {

// Order of the codes in 32-bit words: eight outputs of one input, in order or in AutoAWQ's, or eight inputs of one
// output; `gptq`: eight inputs of one output, in rows of one word per output.
enum class CodeOrder : uint8_t { outputs, awq, inputs, gptq };

// Values by group and output, with the distance in elements between two groups and two outputs.
struct GroupedView {
  const void* data;
  int64_t group, output;
};

struct Int4Part {
  CodeOrder order;
  const uint32_t* codes;  // [k, n / 8] words, or [n, k / 8] in the order `inputs`, [k / 8, n] in the order `gptq`
  int64_t row;            // distance of two rows of `codes`, in words
  GroupedView scales;     // 2 or 4 bytes each, stored unchanged
  GroupedView zeros;      // words of eight outputs, `output` in words; null: the zero point is 8
  int64_t k, n, group;    // n and group are multiples of 8
};

// Fills data [blocks, k / 8, 16], scales and zeros [blocks, k / group, 16] from output `first` on, a multiple of 8.
void pack_int4(const Int4Part& part, int64_t first, int64_t scale_bytes, uint32_t* data, void* scales, uint8_t* zeros);

// Packs n rows of `words` 32-bit words, `stride` words apart, into out [n / 16, words, 16], padded with zero rows.
void pack_rows(const uint32_t* rows, int64_t n, int64_t words, int64_t stride, uint32_t* out);

// Quantises n rows of k float32 or bfloat16 values, `stride` values apart, to int8 like model/formats/int8.py: into
// data [n / 16, k / 4, 16] and scales [n / 16, k / group, 16] in bfloat16, padded with zero rows.
void pack_int8(const void* rows, bool is_f32, int64_t n, int64_t k, int64_t stride, int64_t group, uint32_t* data,
               uint16_t* scales);

// Rows of GGML's quantised blocks, `stride` bytes apart.
struct BlockPart {
  const uint8_t* rows;
  int64_t stride, n, k;
};

struct BlockTargets {
  uint32_t* data;  // [blocks, k / 8, 16] for 4 bits per code, [blocks, k / 4, 16] for 8
  void* scales;    // [blocks, k / group, 16]
  void* minima;    // the same, or null
  uint16_t* super_scales;  // [blocks, k / 256, 16] float16 if scales are bytes, else null
  uint16_t* super_minima;  // the same, for minima
};

// A type of blocks, and the function that packs rows of them as the outputs from `first` on.
struct BlockLayout {
  int64_t inputs, bytes;              // of one block
  int64_t group, bits;                // inputs per scale; of a packed code
  int64_t scale_bytes;                // 2: float16; 1: bytes with a super-scale; of scales and minima
  bool signed_scales;                 // whether scales of one byte are signed
  bool minima;                        // whether weights have a minimum per group
  void (*pack)(const BlockPart& part, int64_t first, const BlockTargets& to);
};
std::optional<BlockLayout> block_layout(const std::string& name);  // by GGML's name, such as "Q4_K"

// One checksum per started MiB. It changes with every bit and is the same on every machine.
constexpr int64_t kChecksumBlockBytes = 1 << 20;
void checksums(const uint8_t* data, int64_t bytes, uint64_t* sums);

}  // namespace swiftspec::host
