// Joins what the tiles have found: those of a cluster, then the clusters of a row. Always in the order of the keys.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/ieee.h"
#include "cuda/attention/tile.h"

namespace swiftspec::attention {

struct Piece {
  float top, total, value;  // value: of one dimension
};

// `count` pieces in their order; those without keys change nothing, to the bit.
template <class At>
SWIFTSPEC_HD Piece join(int64_t count, At at) {
  Piece sum = {-INFINITY, 0, 0};
  for (int64_t i = 0; i < count; ++i) sum.top = fmaxf(sum.top, at(i).top);
  for (int64_t i = 0; i < count; ++i) {
    const Piece piece = at(i);
    if (piece.top == -INFINITY) continue;
    const float weight = exp2f(piece.top - sum.top);
    sum.total = fmaf(weight, piece.total, sum.total);
    sum.value = fmaf(weight, piece.value, sum.value);
  }
  return sum;
}

template <class F>
SWIFTSPEC_HD void write_out(const Job<F>& j, int column, int dimension, const Piece& sum) {
  const int64_t row = j.group.first + column / j.heads(), head = j.head * j.heads() + column % j.heads();
  j.out[(row * j.setup.heads + head) * j.setup.dim + dimension] = bf16::nearest(ieee::div(sum.value, sum.total));
}

// Calls back for every (column, dimension) that falls to this thread of the cluster's block `rank`.
template <class F, class Do>
SWIFTSPEC_HD void each_mine(const Job<F>& j, int rank, int thread, Do work) {
  for (int i = thread; i < static_cast<int>(parts(j.columns() - rank, F::kCluster)) * F::kDim; i += kThreads) {
    work(rank + i / F::kDim * F::kCluster, i % F::kDim);
  }
}

// The cluster's tiles; `block(i)` is block i's shared memory. Where a block takes its part's tiles in turn, this one is
// the `turn`-th and what it joins them to is in part_values, `tops` and `totals`. `done`: the row has no more keys.
template <class F, class Blocks>
SWIFTSPEC_HD void join_tiles(const Job<F>& j, const Shared<F>& s, int rank, int thread, int64_t turn, bool done,
                             Blocks block) {
  const int before = F::kInTurn && turn > 0 ? 1 : 0;
  each_mine(j, rank, thread, [&](int column, int dimension) {
    float* value = j.setup.part_values + j.scratch(j.part, column) * F::kDim + dimension;
    const Piece sum = join(before + F::kCluster, [&](int64_t i) {
      if (i < before) return Piece{s.tops[column], s.totals[column], *value};
      const Shared<F>* other = block(static_cast<int>(i) - before);
      const float top = other->top[column];
      return top == -INFINITY ? Piece{top, 0, 0} : Piece{top, other->total[column], other->scores[column][dimension]};
    });
    if (done) return write_out(j, column, dimension, sum);
    *value = sum.value;
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
  const Piece sum = join(turn > 0 ? 2 : 1, [&](int64_t i) {
    if (i > 0 || turn == 0) return Piece{s.top[thread], s.total[thread], 0};
    return Piece{s.tops[thread], s.totals[thread], 0};
  });
  s.tops[thread] = sum.top;
  s.totals[thread] = sum.total;
}

// What other blocks wrote before this one was told so: past L1.
SWIFTSPEC_HD float written(const float* p) {
#ifdef __CUDA_ARCH__
  return __ldcg(p);
#else
  return *p;
#endif
}

// The last cluster of a group: its `count` parts.
template <class F>
SWIFTSPEC_HD void join_parts(const Job<F>& j, int rank, int thread, int64_t count) {
  each_mine(j, rank, thread, [&](int column, int dimension) {
    write_out(j, column, dimension, join(count, [&](int64_t i) {
                const int64_t at = j.scratch(i, column);
                const float top = written(j.setup.part_sums + 2 * at);
                if (top == -INFINITY) return Piece{top, 0, 0};
                return Piece{top, written(j.setup.part_sums + 2 * at + 1),
                             written(j.setup.part_values + at * F::kDim + dimension)};
              }));
  });
}

}  // namespace swiftspec::attention
