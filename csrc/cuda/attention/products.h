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

// Operand B over k .. k + 15 for columns 8 n .. 8 n + 7, from lines of bfloat16; columns outside first .. end - 1 are
// 0.
SWIFTSPEC_HD mma::B load_columns(const uint16_t* lines, int64_t stride, int n, int k, int first, int end) {
  mma::B b;
  SWIFTSPEC_EACH_LANE(lane) {
    const int column = 8 * n + fragment::b_column(lane);
    for (int i = 0; i < 2; ++i) {
      const uint16_t* pair = lines + column * stride + k + fragment::b_row(lane, i);
      b(lane).r[i] = column >= first && column < end ? *reinterpret_cast<const uint32_t*>(pair) : 0;
    }
  }
  return b;
}

// Computes this warp's share of the scores of units first .. first + count - 1, which lie in the stage from `slot` on.
template <class F>
SWIFTSPEC_HD void score_units(const TileTask<F>& j, SharedMemory<F>& s, int first, int count, int slot,
                              int warp_index) {
  for (int u = warp_index; u < count; u += kWarps) {
    const Unit unit = unit_at(j, s, first + u);
    const int from = unit.first / 8, to = (unit.end + 7) / 8;
    mma::C sums[kColumns / 8] = {};
    SWIFTSPEC_UNROLL
    for (int k = 0; k < F::kDim; k += 16) {
      warp::PerLane<const uint16_t*> lines;
      SWIFTSPEC_EACH_LANE(lane) { lines(lane) = &s.stage[slot + u][lane % 16][k + lane / 16 * 8]; }
      mma::A a;
      mma::load_matrices<false>(a, lines);
      SWIFTSPEC_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        if (n >= from && n < to) {
          mma::multiply(sums[n], a, load_columns(s.queries[0], F::kDim + kPad, n, k, 0, kColumns));
        }
      }
    }
    SWIFTSPEC_EACH_LANE(lane) {
      SWIFTSPEC_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        SWIFTSPEC_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int column = 8 * n + fragment::c_column(lane, i);
          if (column >= unit.first && column < unit.end) {
            s.scores[column][unit.index * kUnit + fragment::c_row(lane, i)] = sums[n](lane).r[i];
          }
        }
      }
    }
  }
}

// Replaces scores by 2^(score - top) in bfloat16, in the memory of the scores; zero for keys beyond the end of a row. A
// warp processes every kWarps-th column, several at a time, so that the latencies of their reductions overlap.
template <class F>
SWIFTSPEC_HD void softmax_tile(const TileTask<F>& j, SharedMemory<F>& s, int warp_index) {
  constexpr int kKeysPerLane = F::kTile / 32, kUnrolled = 4;
  const float none = -INFINITY;
  const int end = 8 * j.column_blocks();
  for (int first = warp_index; first < end; first += kUnrolled * kWarps) {
    warp::PerLane<warp::Regs<kKeysPerLane, float>> x[kUnrolled];
    warp::PerLane<float> top[kUnrolled], total[kUnrolled];
    int keys[kUnrolled];
    SWIFTSPEC_UNROLL
    for (int c = 0; c < kUnrolled; ++c) {
      const int column = first + c * kWarps;
      keys[c] = column < j.columns() ? s.key_counts[column / j.heads()] - j.first_key() : 0;
      SWIFTSPEC_EACH_LANE(lane) {
        top[c](lane) = none;
        for (int i = 0; i < kKeysPerLane; ++i) {
          const int key = lane + 32 * i;
          x[c](lane).r[i] = key < keys[c] ? ieee::mul(s.scores[column][key], j.setup.scale) : none;
          top[c](lane) = fmaxf(top[c](lane), x[c](lane).r[i]);
        }
      }
    }
    SWIFTSPEC_UNROLL
    for (auto& t : top) t = warp::all_reduce(t, [](float a, float b) { return fmaxf(a, b); });
    warp::sync();  // all lanes have read before any lane writes
    SWIFTSPEC_UNROLL
    for (int c = 0; c < kUnrolled; ++c) {
      const int column = first + c * kWarps;
      SWIFTSPEC_EACH_LANE(lane) {
        auto* shares = reinterpret_cast<uint16_t*>(s.scores[column < end ? column : first]);
        total[c](lane) = 0;
        for (int i = 0; i < kKeysPerLane; ++i) {
          const int key = lane + 32 * i;
          const uint16_t share = bf16::nearest(key < keys[c] ? exp2f(x[c](lane).r[i] - top[c](lane)) : 0);
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
        if (lane == 0 && first + c * kWarps < end) {
          s.top[first + c * kWarps] = top[c](lane);
          s.total[first + c * kWarps] = total[c](lane);
        }
      }
    }
  }
}

// Partition of the output over the warps: warp w computes 16 dimensions from 16 (w % kBlocks) on, and every kSplit-th
// block of columns from block w / kBlocks on.
template <class F>
struct Output {
  static constexpr int kBlocks = F::kDim / 16, kSplit = kWarps / kBlocks, kMine = kColumns / 8 / kSplit;
  mma::C sums[kMine];
  SWIFTSPEC_HD static int dimension(int warp_index) { return warp_index % kBlocks * 16; }
  SWIFTSPEC_HD static int columns(int warp_index, int i) { return i * kSplit + warp_index / kBlocks; }
};

// Accumulates the values of units first .. first + count - 1, which lie in the stage from `slot` on. The units of a row
// come in the order of its keys; units of other rows contribute nothing.
template <class F>
SWIFTSPEC_HD void accumulate_values(const TileTask<F>& j, const SharedMemory<F>& s, Output<F>& out, int first,
                                    int count, int slot, int warp_index) {
  for (int u = 0; u < count; ++u) {
    const Unit unit = unit_at(j, s, first + u);
    const int from = unit.first / 8, to = (unit.end + 7) / 8, dimension = out.dimension(warp_index);
    warp::PerLane<const uint16_t*> lines;
    SWIFTSPEC_EACH_LANE(lane) {
      lines(lane) = &s.stage[slot + u][lane % 8 + lane / 16 * 8][dimension + lane / 8 % 2 * 8];
    }
    mma::A a;
    mma::load_matrices<true>(a, lines);
    const auto* shares = reinterpret_cast<const uint16_t*>(s.scores[0]);
    SWIFTSPEC_UNROLL
    for (int i = 0; i < Output<F>::kMine; ++i) {
      const int n = out.columns(warp_index, i);
      if (n >= from && n < to) {
        const auto b = load_columns(shares, 2 * F::kScoreStride, n, unit.index * kUnit, unit.first, unit.end);
        mma::multiply(out.sums[i], a, b);
      }
    }
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
