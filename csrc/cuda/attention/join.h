// Joins what the tiles have found: those of a cluster, then the clusters of a row. Always in the order of the keys.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/ieee.h"
#include "cuda/attention/tile.h"

namespace swiftspec::attention {

constexpr int kAbreast = 4;  // dimensions that a thread joins

struct alignas(16) Values {
  float of[kAbreast];
};

// What some keys of a row come to: the top of their scores, the sum of their shares, and `value` of some dimensions.
struct Piece {
  float top, total;
  Values value;
};

// Pieces are added in their order; those without keys change nothing, to the bit, whatever is in them.
SWIFTSPEC_HD void add(Piece& sum, const Piece& piece) {
  const bool none = piece.top == -INFINITY;
  const float weight = exp2f(piece.top - sum.top), total = fmaf(weight, piece.total, sum.total);
  sum.total = none ? sum.total : total;
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kAbreast; ++i) {
    const float value = fmaf(weight, piece.value.of[i], sum.value.of[i]);
    sum.value.of[i] = none ? sum.value.of[i] : value;
  }
}

// `kCount` pieces. All are read before any is added, without a branch, so that their latencies overlap.
template <int kCount, class At>
SWIFTSPEC_HD Piece join(At at) {
  Piece pieces[kCount], sum = {-INFINITY, 0, {}};
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kCount; ++i) pieces[i] = at(i);
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kCount; ++i) sum.top = fmaxf(sum.top, pieces[i].top);
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kCount; ++i) add(sum, pieces[i]);
  return sum;
}

// Any number of them: `top(i)` alone is asked for first.
template <class Top, class At>
SWIFTSPEC_HD Piece join(int64_t count, Top top, At at) {
  Piece sum = {-INFINITY, 0, {}};
  for (int64_t i = 0; i < count; ++i) sum.top = fmaxf(sum.top, top(i));
  for (int64_t i = 0; i < count; ++i) add(sum, at(i));
  return sum;
}

template <class F>
SWIFTSPEC_HD void write_out(const Job<F>& j, int column, int dimension, const Piece& sum) {
  struct alignas(8) Four {
    uint16_t of[kAbreast];
  } four;
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kAbreast; ++i) four.of[i] = bf16::nearest(ieee::div(sum.value.of[i], sum.total));
  const int64_t row = j.group.first + column / j.heads(), head = j.head * j.heads() + column % j.heads();
  *reinterpret_cast<Four*>(j.out + (row * j.setup.heads + head) * j.setup.dim + dimension) = four;
}

// Calls back for every (column, first of kAbreast dimensions) that falls to this thread of the cluster's block `rank`.
template <class F, class Do>
SWIFTSPEC_HD void each_mine(const Job<F>& j, int rank, int thread, Do work) {
  constexpr int kEach = F::kDim / kAbreast;
  for (int i = thread; i < static_cast<int>(parts(j.columns() - rank, F::kCluster)) * kEach; i += kThreads) {
    work(rank + i / kEach * F::kCluster, i % kEach * kAbreast);
  }
}

// The cluster's tiles; `block(i)` is block i's shared memory. Where a block takes its part's tiles in turn, this one is
// the `turn`-th and what it joins them to is in part_values, `tops` and `totals`. `done`: the row has no more keys.
template <class F, class Blocks>
SWIFTSPEC_HD void join_tiles(const Job<F>& j, const Shared<F>& s, int rank, int thread, int64_t turn, bool done,
                             Blocks block) {
  constexpr int kBefore = F::kInTurn ? 1 : 0;
  each_mine(j, rank, thread, [&](int column, int dimension) {
    auto* values = reinterpret_cast<Values*>(j.setup.part_values + j.scratch(j.part, column) * F::kDim + dimension);
    const Piece sum = join<kBefore + F::kCluster>([&](int i) {
      if (i < kBefore) return turn > 0 ? Piece{s.tops[column], s.totals[column], *values} : Piece{-INFINITY, 0, {}};
      const Shared<F>* other = block(i - kBefore);
      const auto* value = reinterpret_cast<const Values*>(&other->scores[column][dimension]);
      return Piece{other->top[column], other->total[column], *value};
    });
    if (done) return write_out(j, column, dimension, sum);
    *values = sum.value;
    if (dimension == 0) {
      float* sums = j.setup.part_sums + 2 * j.scratch(j.part, column);
      sums[0] = sum.top;
      sums[1] = sum.total;
    }
  });
}

// Notes the sums of a part's tiles so far; after all threads have joined.
template <class F>
SWIFTSPEC_HD void note_sums(const Job<F>& j, Shared<F>& s, int thread, int64_t turn) {
  if (!F::kInTurn || thread >= j.columns()) return;
  const Piece sum = join<2>([&](int i) {
    if (i > 0) return Piece{s.top[thread], s.total[thread], {}};
    return turn > 0 ? Piece{s.tops[thread], s.totals[thread], {}} : Piece{-INFINITY, 0, {}};
  });
  s.tops[thread] = sum.top;
  s.totals[thread] = sum.total;
}

// What other blocks wrote before this one was told so: past L1.
template <class T>
SWIFTSPEC_HD T written(const T* p) {
#ifdef __CUDA_ARCH__
  return __ldcg(p);
#else
  return *p;
#endif
}
SWIFTSPEC_HD Values written(const Values* p) {
#ifdef __CUDA_ARCH__
  const float4 four = __ldcg(reinterpret_cast<const float4*>(p));
  return {four.x, four.y, four.z, four.w};
#else
  return *p;
#endif
}

// The last cluster of a group: its `count` parts.
template <class F>
SWIFTSPEC_HD void join_parts(const Job<F>& j, int rank, int thread, int64_t count) {
  each_mine(j, rank, thread, [&](int column, int dimension) {
    const auto top = [&](int64_t i) { return written(j.setup.part_sums + 2 * j.scratch(i, column)); };
    const Piece sum = join(count, top, [&](int64_t i) {
      const int64_t at = j.scratch(i, column);
      const auto* values = reinterpret_cast<const Values*>(j.setup.part_values + at * F::kDim + dimension);
      return Piece{top(i), written(j.setup.part_sums + 2 * at + 1), written(values)};
    });
    write_out(j, column, dimension, sum);
  });
}

}  // namespace swiftspec::attention
