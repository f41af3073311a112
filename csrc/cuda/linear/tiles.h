// Layout of packed weights in device memory and the assignment of elements to lanes. Arithmetic only, for host code and
// device code, so that tests/native/cuda_tiles.cpp runs all of it on a CPU.
//
// The product. out = x W^T, W [n, k]. The weights are operand A of mma.m16n8k16 (16 outputs), the rows of x operand B
// (8 rows), so one row costs as much as eight. A strip is 32 outputs: 16 `first` ones, and the 16 that lie half the
// outputs further on (`second`), in two m16 fragments. With SwiGLU first and second are gate and up: both lie in one
// lane. In a QKV projection (`heads`) `second` lies half a head further on, so that a lane has both elements that
// RoPE rotates. Other projections lose nothing by the order. Results are always stored in the order of the outputs.
//
// A tile is a strip times 128 inputs (int4) or 64 (bf16), in the order in which the lanes of a warp read it, followed
// by the scales and zero points of its groups. Tiles are stored strip by strip. One bulk copy fetches one tile.
//
// Inputs are processed in blocks of 32, two k16 steps. The order inside a block is arbitrary, as long as A and B agree:
// t = lane % 4 holds inputs 8t to 8t + 7, so that its B operands of both steps are 16 contiguous bytes of a row of x.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ieee.h"
#include "common/ll.h"
#include "cuda/fragment.h"
#include "cuda/linear/tiling.h"

#if defined(__CUDA_ARCH__)
#include "cuda/ptx.cuh"
#endif

namespace swiftspec::cuda::tiles {

// --- element to lane mapping -----------------------------------------------------------------------------------------

// The `first` (second = 0) or `second` output of a pair. Neighbouring pairs have neighbouring outputs, head by head if
// there are heads.
SWIFTSPEC_HD int64_t output_of_pair(const Tiling& t, int64_t pair, int second) {
  return pair + (pair & t.heads) + (second != 0 ? t.apart : 0);
}

// Output of row r of fragment f (0 or 1) of a strip; -1: padding.
SWIFTSPEC_HD int64_t output_of(const Tiling& t, int strip, int f, int r) {
  const int64_t pair = 16 * static_cast<int64_t>(strip) + 2 * (r % 8) + f;
  const int64_t output = output_of_pair(t, pair, r / 8);
  return pair < t.half && output < t.n ? output : -1;
}

// Input of column c of k16 step `step`.
SWIFTSPEC_HD int64_t input_of(int64_t step, int c) {
  const int t = c % 8 / 2, high = c / 8, odd = static_cast<int>(step % 2);
  return step / 2 * kBlock + 8 * t + 4 * odd + 2 * high + c % 2;
}

// Index of the word of an int4 tile with a lane's eight codes of a step and fragment. Nibbles i and 4 + i are register
// i of A.
SWIFTSPEC_HD int code_word(int step, int lane, int f) { return (step / 2 * 32 + lane) * 4 + step % 2 * 2 + f; }
// Index of the four words of an int4 tile with scale and zero point of rows lane / 4 and lane / 4 + 8 of both
// fragments.
SWIFTSPEC_HD int group_words(int group, int lane) { return kCodeWords + (group * 8 + fragment::c_row(lane, 0)) * 4; }
// Index of the word of a bf16 tile with register i of A.
SWIFTSPEC_HD int dense_word(int step, int lane, int f, int i) { return ((step * 2 + f) * 32 + lane) * 4 + i; }

// Index of the 16-byte piece of x in shared memory with a lane's B operands of a block, for rows 8j to 8j + 7.
SWIFTSPEC_HD int x_piece(int block, int rows8, int j, int lane) { return (block * rows8 + j) * 32 + lane; }
SWIFTSPEC_HD int x_row(int j, int lane) { return 8 * j + fragment::b_column(lane); }
// The same index for a row and eight inputs: number `eighth` of those of all blocks.
SWIFTSPEC_HD int x_piece_of(int eighth, int rows8, int row) {
  return x_piece(eighth / 4, rows8, row / 8, row % 8 * 4 + eighth % 4);
}
SWIFTSPEC_HD int64_t x_input(int64_t block, int lane) { return block * kBlock + 8 * (lane % 4); }

// The sums of a lane for rows 8j..: pairs of outputs, `first` and `second`, for each of two rows. An LL line holds one
// pair of outputs for both rows. The set of lines depends only on n and the rows, since ranks may differ in k.
SWIFTSPEC_HD int64_t pair_of_outputs(int strip, int lane) {
  return 16 * static_cast<int64_t>(strip) + fragment::c_row(lane, 0) * 2;
}
SWIFTSPEC_HD int64_t ll_strips(const Tiling& t) { return ceil_div(t.half, kStrip / 2); }
SWIFTSPEC_HD bool has_line(const Tiling& t, int strip, int j, int lane, int64_t rows) {
  return strip < ll_strips(t) && 8 * j + fragment::c_column(lane, 0) < rows;
}
SWIFTSPEC_HD int64_t ll_line(const Tiling& t, int strip, int j, int lane, int second) {
  return ((4 * static_cast<int64_t>(j) + lane % 4) * ll_strips(t) + strip) * 16 + 8 * second + lane / 4;
}
SWIFTSPEC_HD int64_t ll_lines(const Tiling& t, int64_t rows) { return ceil_div(rows, 2) * ll_strips(t) * 16; }

// Index of four sums of a lane, in units of 16 bytes: per warp, or after the reduction over the warps of a strip.
SWIFTSPEC_HD int partial_at(int warp, int rows8, int j, int f, int lane) {
  return ((warp * rows8 + j) * 2 + f) * 32 + lane;
}

// --- int4 -----------------------------------------------------------------------------------------------------------

SWIFTSPEC_HD uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return ptx::and_or(x, mask, bits);
#else
  return (x & mask) | bits;
#endif
}

// A group's scale and zero point in one word: the zero point replaces the last four mantissa bits of the float. Scales
// that were fp16 or bf16 lose nothing.
SWIFTSPEC_HD uint32_t pack_group(float scale, uint32_t zero) { return ((ieee::bits_of(scale) + 8) & ~15u) | zero; }
SWIFTSPEC_HD float scale_of(uint32_t word) { return ieee::of_bits(word & ~15u); }
// 128 + zero point, without an integer conversion: the last mantissa bit of a float of size 2^23 counts 1.
SWIFTSPEC_HD float offset_of(uint32_t word) { return ieee::of_bits(and_or(word, 15u, 0x4b000080u)) - 8388608.0f; }

// Nibbles i and 4 + i as two bf16 values 128 + code: 0x4300 is 128, whose last mantissa bit counts 1.
SWIFTSPEC_HD uint32_t codes_to_bf16(uint32_t word, int i) { return and_or(word >> 4 * i, 0x000f000fu, 0x43004300u); }

// Adds a group's contribution: scale (sum of (128 + code) x - (128 + zero) sum of x). The order of rounding is fixed.
SWIFTSPEC_HD float fold(float total, float product, uint32_t group_word, float x_sum) {
  const float centred = fmaf(-offset_of(group_word), x_sum, product);
  return fmaf(scale_of(group_word), centred, total);
}

// --- bf16 -----------------------------------------------------------------------------------------------------------

SWIFTSPEC_HD float low(uint32_t pair) { return ieee::of_bits(pair << 16); }
SWIFTSPEC_HD float high(uint32_t pair) { return ieee::of_bits(pair & 0xffff0000u); }
SWIFTSPEC_HD uint32_t pair_of(float a, float b) {
#if defined(__CUDA_ARCH__)
  return ptx::bf16_pair(a, b);
#else
  return static_cast<uint32_t>(ll::Bfloat16::round(b)) << 16 | ll::Bfloat16::round(a);
#endif
}
SWIFTSPEC_HD float rounded(float x) { return low(pair_of(x, 0)); }

// RMSNorm of two values, rounded before the weight is applied, as transformers does.
SWIFTSPEC_HD uint32_t normalised(uint32_t x, float scale, uint32_t weight) {
  const uint32_t scaled = pair_of(low(x) * scale, high(x) * scale);
  return pair_of(low(scaled) * low(weight), high(scaled) * high(weight));
}

// The sum of the eight values of a piece, in a fixed order.
SWIFTSPEC_HD float sum8(const uint32_t (&piece)[4]) {
  const float a = low(piece[0]) + high(piece[0]), b = low(piece[1]) + high(piece[1]);
  const float c = low(piece[2]) + high(piece[2]), d = low(piece[3]) + high(piece[3]);
  return (a + b) + (c + d);
}

}  // namespace swiftspec::cuda::tiles
