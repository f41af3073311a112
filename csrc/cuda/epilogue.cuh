// From the sums of the warps to the outputs: joined in a fixed order, then bias, SwiGLU, residual or all-reduce.
#pragma once

#include "linear.cuh"
#include "ll.cuh"

namespace swiftspec::cuda {

// The warps' sums, joined over the warps of each strip, where the cluster can read them. Two buffers in turn: a CTA that
// writes the next sums while another still reads these writes the other buffer, and there is a barrier in between.
template <int kRows8>
__device__ const float4* join(const LinearTask& task, const Place& at, int turn, const Sums<kRows8>& sums,
                              uint8_t* shared) {
  auto* joined = reinterpret_cast<float4*>(shared + task.carve.joined + turn % 2 * task.carve.joined_bytes);
  auto* partial = reinterpret_cast<float4*>(shared + task.carve.partial);
  const int share = task.plan.warps_k();
  float4* mine = share > 1 ? partial : joined;
#pragma unroll
  for (int i = 0; i < 2 * kRows8; ++i) {
    const float(&s)[4] = sums[i % 2][i / 2];
    mine[tiles::partial_at(at.warp, kRows8, i / 2, i % 2, at.lane)] = {s[0], s[1], s[2], s[3]};
  }
  if (share == 1) return joined;
  __syncthreads();
  constexpr int kStrip = kRows8 * 2 * 32;
  for (int i = threadIdx.x; i < kStrip << task.plan.n_log; i += tiles::kThreads) {
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

__device__ inline float4 sum_of_cluster(const float4* mine, int ctas) {
  float4 total = ptx::remote_load4(mine, 0);
#pragma unroll 4
  for (int cta = 1; cta < ctas; ++cta) {
    const float4 next = ptx::remote_load4(mine, cta);
    total = {total.x + next.x, total.y + next.y, total.z + next.z, total.w + next.w};
  }
  return total;
}

// Two neighbouring values, of which the first `count` exist.
__device__ inline void store_two(uint16_t* to, int64_t count, float a, float b) {
  if (count >= 2 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = tiles::pair_of(a, b);
    return;
  }
  if (count >= 1) to[0] = static_cast<uint16_t>(tiles::pair_of(a, b));
  if (count >= 2) to[1] = static_cast<uint16_t>(tiles::pair_of(b, a));
}

__device__ inline void store_two(float* to, int64_t count, float a, float b) {
  if (count >= 1) to[0] = a;
  if (count >= 2) to[1] = b;
}

// Outputs `output` and the next of a row: the product, rounded and added to the residual where there is one.
__device__ inline void store_outputs(const LinearTask& task, int64_t row, int64_t output, int64_t count, float a,
                                     float b) {
  const int64_t place = row * task.plan.n + output;
  if (task.logits != nullptr) return store_two(task.logits + place, count, a, b);
  if (task.residual != nullptr) {
    if (count >= 1) a = tiles::rounded(a) + ll::Bfloat16::widen(task.residual[place]);
    if (count >= 2) b = tiles::rounded(b) + ll::Bfloat16::widen(task.residual[place + 1]);
  }
  store_two(task.out + place, count, a, b);
}

__device__ inline float silu_times(float gate, float up) {
  gate = tiles::rounded(gate);
  return tiles::gated(gate, tiles::rounded(up), __fdividef(1.0f, 1.0f + __expf(-gate)));
}

// A lane's unit: outputs [first, second][two neighbours] of rows [two neighbours], for eight rows of a strip.
struct Unit {
  int strip, j;
  float value[2][2][2];  // [second][row][neighbour]
};

__device__ inline int64_t outputs_left(const tiles::Plan& p, int64_t pair, int second) {
  const int64_t here = p.half - pair, all = p.n - p.half - pair;
  return second == 0 ? here : all;
}

// The bias, which int4 and bf16 weights may have.
__device__ inline void add_bias(const LinearTask& task, int lane, Unit& unit) {
  if (task.bias == nullptr) return;
  const int64_t pair = tiles::pair_of_outputs(unit.strip, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // [second][neighbour]
    if (i % 2 >= outputs_left(task.plan, pair, i / 2)) continue;
    const float bias = task.bias[i / 2 * task.plan.half + pair + i % 2];
    unit.value[i / 2][0][i % 2] += bias;
    unit.value[i / 2][1][i % 2] += bias;
  }
}

__device__ inline void store_unit(const LinearTask& task, int lane, const Unit& unit) {
  const int64_t pair = tiles::pair_of_outputs(unit.strip, lane), half = task.plan.half;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int64_t row = 8 * unit.j + tiles::c_column(lane, e);
    if (row >= task.rows) continue;
    const float(&first)[2] = unit.value[0][e];
    const float(&second)[2] = unit.value[1][e];
    if (task.swiglu) {
      const float a = silu_times(first[0], second[0]), b = silu_times(first[1], second[1]);
      store_two(task.out + row * half + pair, half - pair, a, b);
    } else {
      store_outputs(task, row, pair, outputs_left(task.plan, pair, 0), first[0], first[1]);
      store_outputs(task, row, half + pair, outputs_left(task.plan, pair, 1), second[0], second[1]);
    }
  }
}

// The two LL lines of a unit: a pair of outputs, rounded, for both rows.
__device__ inline uint64_t line_of(const Unit& unit, int second) {
  const float(&v)[2][2] = unit.value[second];
  return static_cast<uint64_t>(tiles::pair_of(v[1][0], v[1][1])) << 32 | tiles::pair_of(v[0][0], v[0][1]);
}

__device__ inline void set_line(Unit& unit, int second, uint64_t payload) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unit.value[second][i / 2][i % 2] = ll::Bfloat16::widen(static_cast<uint16_t>(payload >> 16 * i));
  }
}

// Calls one(unit without values, lane) for the units of a turn that are this warp's: every eight rows of every strip,
// spread over the warps of the cluster.
template <int kRows8, class One>
__device__ void each_unit(const LinearTask& task, const Place& at, int first_strip, One one) {
  const int step = tiles::kWarps << task.plan.cluster_log;
  for (int i = (at.warp << task.plan.cluster_log) + at.cta; i < kRows8 << task.plan.n_log; i += step) {
    Unit unit;
    unit.strip = first_strip + i / kRows8, unit.j = i % kRows8;
    one(unit);
  }
}

template <int kRows8>
__device__ void read_unit(const LinearTask& task, const Place& at, int first_strip, const float4* joined, Unit& unit) {
#pragma unroll
  for (int f = 0; f < 2; ++f) {
    const int place = tiles::partial_at(unit.strip - first_strip, kRows8, unit.j, f, at.lane);
    const float4 v = sum_of_cluster(joined + place, task.plan.cluster());
    unit.value[0][0][f] = v.x, unit.value[0][1][f] = v.y, unit.value[1][0][f] = v.z, unit.value[1][1][f] = v.w;
  }
}

}  // namespace swiftspec::cuda
