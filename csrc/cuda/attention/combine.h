// Combination of partial softmax results (flash-decoding style): the blocks of a cluster, then the parts of a row.
// Always in the order of the keys.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/ieee.h"
#include "cuda/attention/load.h"
#include "cuda/attention/tile.h"
#include "cuda/mma.h"

namespace swiftspec::attention {

constexpr int kDimsPerThread = 4;

struct alignas(16) Values {
  float of[kDimsPerThread];
};

// Partial result over some keys of a row: maximum score, sum of exponentials, and the weighted values of some
// dimensions.
struct PartialOutput {
  float top, total;
  Values value;
};

// Adds a partial to the sum. The order of the partials matters; one without keys leaves the sum bitwise unchanged,
// whatever its other fields contain.
SWIFTSPEC_HD void merge(PartialOutput& sum, const PartialOutput& partial) {
  const bool none = partial.top == -INFINITY;
  const float weight = exp2f(partial.top - sum.top), total = fmaf(weight, partial.total, sum.total);
  sum.total = none ? sum.total : total;
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kDimsPerThread; ++i) {
    const float value = fmaf(weight, partial.value.of[i], sum.value.of[i]);
    sum.value.of[i] = none ? sum.value.of[i] : value;
  }
}

// Combines `kCount` partials. All are read before any is added, without a branch, so that their latencies overlap.
template <int kCount, class At>
SWIFTSPEC_HD PartialOutput combine(At at) {
  PartialOutput partials[kCount], sum = {-INFINITY, 0, {}};
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kCount; ++i) partials[i] = at(i);
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kCount; ++i) sum.top = fmaxf(sum.top, partials[i].top);
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kCount; ++i) merge(sum, partials[i]);
  return sum;
}

// Combines any number of partials: first reads the maxima `top(i)`, then the partials `at(i)`, `kAbreast` at a time, so
// that their latencies overlap.
template <int kAbreast, class Top, class At>
SWIFTSPEC_HD PartialOutput combine(int count, Top top, At at) {
  PartialOutput sum = {-INFINITY, 0, {}};
  for (int first = 0; first < count; first += kAbreast) {
    float tops[kAbreast];
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kAbreast; ++i) tops[i] = first + i < count ? top(first + i) : -INFINITY;
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kAbreast; ++i) sum.top = fmaxf(sum.top, tops[i]);
  }
  for (int first = 0; first < count; first += kAbreast) {
    PartialOutput partials[kAbreast];
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kAbreast; ++i)
      partials[i] = first + i < count ? at(first + i) : PartialOutput{-INFINITY, 0, {}};
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kAbreast; ++i) merge(sum, partials[i]);
  }
  return sum;
}

template <class F>
SWIFTSPEC_HD void write_output(const TileTask<F>& j, int column, int dimension, const PartialOutput& sum) {
  struct alignas(8) Four {
    uint16_t of[kDimsPerThread];
  } four;
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kDimsPerThread; ++i) four.of[i] = mma::nearest_bf16(ieee::div(sum.value.of[i], sum.total));
  const int row = j.group.first + column / j.heads(), head = j.head * j.heads() + column % j.heads();
  const int64_t line = static_cast<int64_t>(row) * static_cast<int>(j.setup.heads) + head;
  *reinterpret_cast<Four*>(j.out + line * F::kDim + dimension) = four;
}

// Calls work(column, first of kDimsPerThread dimensions) for every item of this thread of block `rank` of the cluster.
template <class F, class Do>
SWIFTSPEC_HD void for_each_owned(const TileTask<F>& j, int rank, int thread, Do work) {
  constexpr int kVectorsPerColumn = F::kDim / kDimsPerThread;
  for (int i = thread; i < ceil_div32(j.columns() - rank, F::kCluster) * kVectorsPerColumn; i += F::kThreads) {
    work(rank + i / kVectorsPerColumn * F::kCluster, i % kVectorsPerColumn * kDimsPerThread);
  }
}

// Combines the results of the blocks of a cluster; `block(i)` is the shared memory of block i. `done`: the row has no
// other parts, so the result is written to the output.
template <class F, class Blocks>
SWIFTSPEC_HD void combine_blocks(const TileTask<F>& j, int rank, int thread, bool done, Blocks block) {
  for_each_owned(j, rank, thread, [&](int column, int dimension) {
    const PartialOutput sum = combine<F::kCluster>([&](int i) {
      const SharedMemory<F>* other = block(i);
      const auto* value = reinterpret_cast<const Values*>(&other->scores[column][dimension]);
      return PartialOutput{other->top[column], other->total[column], *value};
    });
    if (done) return write_output(j, column, dimension, sum);
    const int64_t line = j.scratch(j.part, column);
    *reinterpret_cast<Values*>(j.setup.part_values + line * F::kDim + dimension) = sum.value;
    if (dimension == 0) {
      float* sums = j.setup.part_sums + 2 * line;
      sums[0] = sum.top;
      sums[1] = sum.total;
    }
  });
}

SWIFTSPEC_HD Values load_uncached(const Values* p) {
#ifdef __CUDA_ARCH__
  const float4 four = __ldcg(reinterpret_cast<const float4*>(p));
  return {four.x, four.y, four.z, four.w};
#else
  return *p;
#endif
}

// Combines the `count` parts of a group; the last cluster of the group to finish runs this.
template <class F>
SWIFTSPEC_HD void combine_parts(const TileTask<F>& j, int rank, int thread, int count) {
  constexpr int kAbreast = 8;
  for_each_owned(j, rank, thread, [&](int column, int dimension) {
    const auto line = [&](int i) { return static_cast<int64_t>(j.scratch(i, column)); };
    const auto top = [&](int i) { return load_uncached(j.setup.part_sums + 2 * line(i)); };
    const PartialOutput sum = combine<kAbreast>(count, top, [&](int i) {
      const int64_t at = line(i);
      const auto* values = reinterpret_cast<const Values*>(j.setup.part_values + at * F::kDim + dimension);
      return PartialOutput{top(i), load_uncached(j.setup.part_sums + 2 * at + 1), load_uncached(values)};
    });
    write_output(j, column, dimension, sum);
  });
}

}  // namespace swiftspec::attention
