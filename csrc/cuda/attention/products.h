// The computation of a tile by the warps of a block: scores, softmax, and weighted sums of values.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/ieee.h"
#include "common/warp.h"
#include "cuda/attention/tile.h"
#include "cuda/fragment.h"
#include "cuda/mma.h"

namespace swiftspec::attention {

// Operands B over k .. k + 15 for two blocks of eight columns, `first` and `second`, from lines of bfloat16.
SWIFTSPEC_HD void load_columns(mma::B (&b)[2], const uint16_t* lines, int stride, int first, int second, int k) {
  warp::PerLane<const uint16_t*> rows;
  SWIFTSPEC_EACH_LANE(lane) {
    rows(lane) = lines + (8 * (lane < 16 ? first : second) + lane % 8) * stride + k + lane / 8 % 2 * 8;
  }
  mma::A both;  // the operand B of a block is its transposed columns, which ldmatrix loads like an operand A
  mma::load_matrices<false>(both, rows);
  SWIFTSPEC_EACH_LANE(lane) {
    for (int i = 0; i < 2; ++i) b[0](lane).r[i] = both(lane).r[i], b[1](lane).r[i] = both(lane).r[2 + i];
  }
}

// Computes this warp's share of the scores of units first .. first + count - 1, which lie in the stage from `slot` on.
// Two warps share a unit, each with half of the blocks of columns; of a unit of a single row, one warp computes the few
// blocks of the row's columns.
template <class F>
SWIFTSPEC_HD void score_units(const TileTask<F>& j, SharedMemory<F>& s, int first, int count, int slot,
                              int warp_index) {
  constexpr int kMost = kColumns / 8 / 2;
  const int half = (j.column_blocks() + 1) / 2, halves = 2 * max32(min32(s.shared_units - first, count), 0);
  const int each = j.heads() <= 8 * (kMost - 1) ? 1 : 2;  // the columns of a row may begin within a block
  for (int item = warp_index; item < halves + each * (count - halves / 2); item += F::kWarps) {
    const int own = item - halves, u = own < 0 ? item / 2 : halves / 2 + own / each;
    const Unit unit = unit_at(j, s, first + u);
    int from = unit.first / 8, to = (unit.end + 7) / 8, begin = min32(from, kColumns / 8 - kMost);
    if (own < 0 || each == 2) {
      begin = item % 2 * half;  // `halves` is even
      from = max32(from, begin);
      to = min32(to, begin + half);
    }
    if (from >= to) continue;
    mma::C sums[kMost] = {};
    SWIFTSPEC_UNROLL_BY(F::kScoreSteps)
    for (int k = 0; k < F::kDim; k += 16) {
      warp::PerLane<const uint16_t*> lines;
      SWIFTSPEC_EACH_LANE(lane) { lines(lane) = &s.stage[slot + u][lane % 16][k + lane / 16 * 8]; }
      mma::A a;
      mma::load_matrices<false>(a, lines);
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kMost; i += 2) {
        if (begin + i >= to || begin + i + 2 <= from) continue;
        mma::B b[2];
        load_columns(b, s.queries[0], F::kDim + kPad, begin + i, begin + i + 1, k);
        mma::multiply(sums[i], a, b[0]);
        mma::multiply(sums[i + 1], a, b[1]);
      }
    }
    // of a shared unit all scores may be written, since no other unit has the same keys
    const bool shared = first + u < s.shared_units;
    SWIFTSPEC_EACH_LANE(lane) {
      float* scores = &s.scores[8 * begin + fragment::c_column(lane, 0)][unit.index * kUnit + fragment::c_row(lane, 0)];
      SWIFTSPEC_UNROLL
      for (int n = 0; n < kMost; ++n) {
        if (begin + n >= to) break;
        SWIFTSPEC_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int column = 8 * (begin + n) + fragment::c_column(lane, i);
          if (shared || (column >= unit.first && column < unit.end)) {
            scores[(8 * n + i % 2) * F::kScoreStride + i / 2 * 8] = sums[n](lane).r[i];
          }
        }
      }
    }
  }
}

// Online softmax: replaces scores by 2^(score - top) in bfloat16, in the memory of the scores; zero for keys beyond the
// end of a row. `top` and `total` of each column are updated, and `rescale` is set. A warp processes every F::kWarps-th
// column, several at a time, so that the latencies of their reductions overlap.
template <class F>
SWIFTSPEC_HD void softmax_tile(const TileTask<F>& j, SharedMemory<F>& s, int warp_index) {
  constexpr int kKeysPerLane = F::kTile / 32, kUnrolled = 2;
  const float none = -INFINITY;
  const int end = 8 * j.column_blocks();
  for (int first = warp_index; first < end; first += kUnrolled * F::kWarps) {
    warp::PerLane<warp::Regs<kKeysPerLane, float>> x[kUnrolled];
    warp::PerLane<float> top[kUnrolled], total[kUnrolled];
    int keys[kUnrolled];     // of the row, from the tile's first one on
    float before[kUnrolled];  // maximum of the tiles before this one
    SWIFTSPEC_UNROLL
    for (int c = 0; c < kUnrolled; ++c) {
      const int column = first + c * F::kWarps;
      keys[c] = column < end ? s.key_counts[column] - j.unit_key(j.tile, 0) : 0;
      before[c] = column < end ? s.top[column] : none;
      SWIFTSPEC_EACH_LANE(lane) {
        top[c](lane) = before[c];
        const int first = lane / kUnit * F::kCluster * kUnit + lane % kUnit;
        for (int i = 0; i < kKeysPerLane; ++i) {
          const bool seen = first + i * 32 * F::kCluster < keys[c];
          x[c](lane).r[i] = seen ? ieee::mul(s.scores[column][lane + 32 * i], j.setup.scale) : none;
          top[c](lane) = fmaxf(top[c](lane), x[c](lane).r[i]);
        }
      }
    }
    SWIFTSPEC_UNROLL
    for (auto& t : top) t = warp::all_reduce(t, [](float a, float b) { return fmaxf(a, b); });
    warp::sync();  // all lanes have read before any lane writes
    SWIFTSPEC_UNROLL
    for (int c = 0; c < kUnrolled; ++c) {
      const int column = first + c * F::kWarps;
      SWIFTSPEC_EACH_LANE(lane) {
        auto* shares = reinterpret_cast<uint16_t*>(s.scores[column < end ? column : first]);
        const float shift = top[c](lane) == none ? 0 : top[c](lane);  // without keys every share is 0
        total[c](lane) = 0;
        for (int i = 0; i < kKeysPerLane; ++i) {
          const int key = lane + 32 * i;
          const uint16_t share = mma::nearest_bf16(exp2f(x[c](lane).r[i] - shift));
          if (column < end) shares[key] = share;
          total[c](lane) += bf16::widen(share);
        }
      }
    }
    SWIFTSPEC_UNROLL
    for (auto& t : total) t = warp::all_reduce(t, [](float a, float b) { return a + b; });
    SWIFTSPEC_UNROLL
    for (int c = 0; c < kUnrolled; ++c) {
      SWIFTSPEC_EACH_LANE(lane) {
        const int column = first + c * F::kWarps;
        if (lane == 0 && column < end) {
          const float factor = exp2f(before[c] - (top[c](lane) == none ? 0 : top[c](lane)));
          s.rescale[column] = factor;
          s.top[column] = top[c](lane);
          s.total[column] = fmaf(factor, s.total[column], total[c](lane));
        }
      }
    }
  }
}

// Partition of the output over the warps: warp w computes 16 dimensions from 16 (w % kBlocks) on, and every kSplit-th
// block of columns from block w / kBlocks on.
template <class F>
struct Output {
  static constexpr int kBlocks = F::kDim / 16, kSplit = F::kWarps / kBlocks, kMine = kColumns / 8 / kSplit;
  mma::C sums[kMine];
  SWIFTSPEC_HD static int dimension(int warp_index) { return warp_index % kBlocks * 16; }
  SWIFTSPEC_HD static int columns(int warp_index, int i) { return i * kSplit + warp_index / kBlocks; }
  // Whether the warp has one of the blocks of columns from `from` to `to` - 1.
  SWIFTSPEC_HD static bool has_columns(int warp_index, int from, int to) {
    static_assert((kSplit & (kSplit - 1)) == 0);
    return from + ((warp_index / kBlocks - from) & (kSplit - 1)) < to;
  }
};

// Multiplies the sums of the tiles before this one by the factors of their columns.
template <class F>
SWIFTSPEC_HD void rescale_output(const SharedMemory<F>& s, Output<F>& out, int warp_index) {
  SWIFTSPEC_EACH_LANE(lane) {
    SWIFTSPEC_UNROLL
    for (int b = 0; b < Output<F>::kMine; ++b) {
      const float* factors = &s.rescale[8 * out.columns(warp_index, b)];
      SWIFTSPEC_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& sum = out.sums[b](lane).r[i];
        sum = ieee::mul(sum, factors[fragment::c_column(lane, i)]);
      }
    }
  }
}

// Accumulates the values of a unit, which lie at `values`, for this warp's blocks of columns from `from` to `to` - 1.
// Columns outside of the unit's own contribute nothing; with kShared there are none.
template <bool kShared, class F>
SWIFTSPEC_HD void accumulate_unit(const SharedMemory<F>& s, Output<F>& out, const Unit& unit, int from, int to,
                                  const uint16_t* values, int warp_index) {
  warp::PerLane<const uint16_t*> lines;
  SWIFTSPEC_EACH_LANE(lane) {
    lines(lane) = values + (lane % 8 + lane / 16 * 8) * (F::kDim + kPad) + lane / 8 % 2 * 8;
  }
  mma::A a;
  mma::load_matrices<true>(a, lines);
  const auto* shares = reinterpret_cast<const uint16_t*>(s.scores[0]) + unit.index * kUnit;
  SWIFTSPEC_UNROLL
  for (int i = 0; i < Output<F>::kMine; i += 2) {
    const int blocks[] = {out.columns(warp_index, i), out.columns(warp_index, i + 1)};
    if (blocks[0] >= to || blocks[1] < from) continue;
    mma::B b[2];
    load_columns(b, shares, 2 * F::kScoreStride, blocks[0], blocks[1], 0);
    SWIFTSPEC_UNROLL
    for (int c = 0; c < 2; ++c) {
      SWIFTSPEC_EACH_LANE(lane) {
        const int column = 8 * blocks[c] + fragment::b_column(lane);
        if (!kShared && (column < unit.first || column >= unit.end)) b[c](lane) = {};
      }
      mma::multiply(out.sums[i + c], a, b[c]);
    }
  }
}

// Accumulates the values of units first .. first + count - 1, which lie in the stage from `slot` on. The units of a row
// come in the order of its keys; units of other rows contribute nothing.
template <class F>
SWIFTSPEC_HD void accumulate_values(const TileTask<F>& j, const SharedMemory<F>& s, Output<F>& out, int first,
                                    int count, int slot, int warp_index) {
  const int shared = min32(s.shared_units - first, count), blocks = j.column_blocks();
  const uint16_t* values = &s.stage[slot][0][out.dimension(warp_index)];
  int u = 0;
  SWIFTSPEC_UNROLL_BY(F::kValueUnits)
  for (; u < shared; ++u, values += kUnit * (F::kDim + kPad)) {
    accumulate_unit<true>(s, out, unit_at(j, s, first + u), 0, blocks, values, warp_index);
  }
  for (; u < count; ++u, values += kUnit * (F::kDim + kPad)) {
    const Unit unit = unit_at(j, s, first + u);
    const int from = unit.first / 8, to = (unit.end + 7) / 8;
    if (out.has_columns(warp_index, from, to)) accumulate_unit<false>(s, out, unit, from, to, values, warp_index);
  }
}

// Stores the output in the memory of the scores.
template <class F>
SWIFTSPEC_HD void store_output(const TileTask<F>& j, SharedMemory<F>& s, const Output<F>& out, int warp_index) {
  SWIFTSPEC_EACH_LANE(lane) {
    SWIFTSPEC_UNROLL
    for (int b = 0; b < Output<F>::kMine; ++b) {
      const int n = out.columns(warp_index, b);
      for (int i = 0; i < 4 && n < j.column_blocks(); ++i) {
        const int dimension = out.dimension(warp_index) + fragment::c_row(lane, i);
        s.scores[8 * n + fragment::c_column(lane, i)][dimension] = out.sums[b](lane).r[i];
      }
    }
  }
}

}  // namespace swiftspec::attention
