// Reduction of the sums over the warps of a CTA and the CTAs of a cluster, in a fixed order. lane_epilogue.h processes
// the result.
#pragma once

#include "cuda/linear/linear.cuh"

namespace swiftspec::cuda {

// Adds the sums of the warps of each strip and stores them where the cluster can read them. Two buffers are used
// alternately, so that a CTA can write its next sums while another one still reads these; a barrier lies in between.
template <int kRows8>
__device__ const float4* reduce_warps(const LinearTask& task, const ThreadIndex& at, int turn, const Sums<kRows8>& sums,
                              uint8_t* shared) {
  auto* joined = reinterpret_cast<float4*>(shared + task.smem.joined + turn % 2 * task.smem.joined_bytes);
  auto* partial = reinterpret_cast<float4*>(shared + task.smem.partial);
  const int share = task.tiling.warps_k();
  float4* mine = share > 1 ? partial : joined;
#pragma unroll
  for (int i = 0; i < 2 * kRows8; ++i) {
    const float(&s)[4] = sums[i % 2][i / 2];
    mine[tiles::partial_at(at.warp, kRows8, i / 2, i % 2, at.lane)] = {s[0], s[1], s[2], s[3]};
  }
  if (share == 1) return joined;
  __syncthreads();
  constexpr int kStrip = kRows8 * 2 * 32;
  for (int i = threadIdx.x; i < kStrip << task.tiling.n_log; i += tiles::kThreads) {
    const float4* from = partial + i / kStrip * share * kStrip + i % kStrip;
    float4 total = from[0];
    for (int warp = 1; warp < share; ++warp) {
      const float4 next = from[warp * kStrip];
      total = {total.x + next.x, total.y + next.y, total.z + next.z, total.w + next.w};
    }
    joined[i] = total;
  }
  return joined;
}

// Adds the sums of the CTAs of the cluster, in order; four are loaded before any is added, so that their latencies
// overlap.
__device__ inline float4 reduce_cluster(const float4* mine, int ctas) {
  constexpr int kAtATime = 4;
  float4 total = {0, 0, 0, 0};  // 0 + x equals x, except for the sign of a zero
  for (int first = 0; first < ctas; first += kAtATime) {
    float4 of[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      if (first + i < ctas) of[i] = ptx::remote_load4(mine, first + i);
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      if (first + i < ctas) total = {total.x + of[i].x, total.y + of[i].y, total.z + of[i].z, total.w + of[i].w};
    }
  }
  return total;
}

// Calls one(unit without values) for this warp's units of an iteration. The units, eight rows of a strip each, are
// distributed over the `warps` warps of every CTA of the cluster.
template <int kRows8, class One>
__device__ void for_each_unit(const LinearTask& task, const ThreadIndex& at, int warps, int first_strip, One one) {
  const int step = warps << task.tiling.cluster_log;
  for (int i = (at.warp << task.tiling.cluster_log) + at.cta; i < kRows8 << task.tiling.n_log; i += step) {
    Unit unit;
    unit.strip = first_strip + i / kRows8, unit.j = i % kRows8;
    if (8 * unit.j < task.rows) one(unit);
  }
}

template <int kRows8>
__device__ void read_unit(const LinearTask& task, const ThreadIndex& at, int first_strip, const float4* joined,
                          Unit& unit) {
#pragma unroll
  for (int f = 0; f < 2; ++f) {
    const int index = tiles::partial_at(unit.strip - first_strip, kRows8, unit.j, f, at.lane);
    const float4 v = reduce_cluster(joined + index, task.tiling.cluster());
    const float sums[4] = {v.x, v.y, v.z, v.w};
    set_sums(unit, f, sums);
  }
}

}  // namespace swiftspec::cuda
