// Weights as their files hold them, made into the blocks of 16 outputs that `linear` reads (host/ops/product.h), on
// all threads. A matrix may come in parts, of which each fills the outputs from `first` on.
#pragma once

#include <cstdint>

#include "kernels_host.h"

namespace swiftspec::host {

// The words of four-bit codes: eight outputs of one input, in order or in AutoAWQ's, or eight inputs of one output.
enum class Codes : uint8_t { outputs, awq, inputs };

// Numbers by group and output, so many elements apart.
struct Grouped {
  const void* data;
  int64_t group, output;
};

struct Int4Part {
  Codes order;
  const uint32_t* codes;  // [K] rows of N / 8 words, or with `inputs` [N] rows of K / 8
  int64_t row;            // words from one of these rows to the next
  Grouped scales;         // 2 or 4 bytes each, as they will be read
  Grouped zeros;          // words of eight outputs, `output` words apart; or null: the zero is 8
  int64_t k, n, group;    // n is a multiple of 8, group one of 8
};

// Fills data [.., K / 8, 16], scales and zeros [.., K / group, 16] from output `first` on, a multiple of 8.
void pack_int4(const Int4Part& part, int64_t first, int64_t scale_bytes, uint32_t* data, void* scales, uint8_t* zeros);

// Rows of `words` 32-bit words, `stride` words apart: out [N / 16, words, 16], filled up with rows of zeros.
void pack_rows(const uint32_t* rows, int64_t n, int64_t words, int64_t stride, uint32_t* out);

// Rows of k floats, or bfloat16, `stride` apart, rounded to int8 as model/formats/int8.py says: data [N / 16, K / 4, 16]
// and scales [N / 16, K / group, 16] in bfloat16, filled up with rows of zeros.
void pack_rounded(const void* rows, bool wide, int64_t n, int64_t k, int64_t stride, int64_t group, uint32_t* data,
                  uint16_t* scales);

// For each whole or begun megabyte a number that changes with every bit of it, the same on every machine.
constexpr int64_t kSumPiece = 1 << 20;
void sums_of(const uint8_t* data, int64_t bytes, uint64_t* sums);

}  // namespace swiftspec::host
