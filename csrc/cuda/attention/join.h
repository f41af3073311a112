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

SWIFTSPEC_HD void write_out(const Job& j, int column, int dimension, const Piece& sum) {
  const int64_t row = j.group.first + column / j.heads(), head = j.head * j.heads() + column % j.heads();
  j.out[(row * j.setup.heads + head) * j.setup.dim + dimension] = bf16::nearest(ieee::div(sum.value, sum.total));
}

// Calls back for every (column, dimension) that falls to this thread of the cluster's block `rank`.
template <int kDim, class Do>
SWIFTSPEC_HD void each_mine(const Job& j, int rank, int thread, Do work) {
  for (int i = thread; i < static_cast<int>(parts(j.columns() - rank, kCluster)) * kDim; i += kThreads) {
    work(rank + i / kDim * kCluster, i % kDim);
  }
}

// The cluster's tiles; `block(i)` is block i's shared memory. A row that fits one cluster is done.
template <int kDim, class Blocks>
SWIFTSPEC_HD void join_tiles(const Job& j, int rank, int thread, bool single, Blocks block) {
  each_mine<kDim>(j, rank, thread, [&](int column, int dimension) {
    const Piece sum = join(kCluster, [&](int64_t i) {
      const Shared<kDim>* s = block(static_cast<int>(i));
      const float top = s->top[column];
      return top == -INFINITY ? Piece{top, 0, 0} : Piece{top, s->total[column], s->scores[column][dimension]};
    });
    if (single) return write_out(j, column, dimension, sum);
    const int64_t at = j.scratch(j.part, column);
    j.setup.part_values[at * kDim + dimension] = sum.value;
    if (dimension == 0) {
      j.setup.part_sums[2 * at] = sum.top;
      j.setup.part_sums[2 * at + 1] = sum.total;
    }
  });
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
template <int kDim>
SWIFTSPEC_HD void join_parts(const Job& j, int rank, int thread, int64_t count) {
  each_mine<kDim>(j, rank, thread, [&](int column, int dimension) {
    write_out(j, column, dimension, join(count, [&](int64_t i) {
                const int64_t at = j.scratch(i, column);
                const float top = written(j.setup.part_sums + 2 * at);
                if (top == -INFINITY) return Piece{top, 0, 0};
                return Piece{top, written(j.setup.part_sums + 2 * at + 1),
                             written(j.setup.part_values + at * kDim + dimension)};
              }));
  });
}

}  // namespace swiftspec::attention
