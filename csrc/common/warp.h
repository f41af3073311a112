// A warp's code, written once: on a device a lane runs it, on a CPU a loop over the lanes does, so that tests run every
// index, fragment and shuffle of a kernel under sanitizers. What a lane keeps between two steps is `PerLane`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/gumbel.h"

#ifdef __CUDA_ARCH__
#include "cuda/attention_ptx.cuh"
#define SWIFTSPEC_EACH_LANE(lane) if (const int lane = static_cast<int>(threadIdx.x) & 31; true)
#define SWIFTSPEC_UNROLL _Pragma("unroll")
#else
#define SWIFTSPEC_UNROLL
#define SWIFTSPEC_EACH_LANE(lane) for (int lane = 0; lane < 32; ++lane)
#endif

namespace swiftspec::warp {

template <class T>
struct PerLane {
#ifdef __CUDA_ARCH__
  T here;
  SWIFTSPEC_HD T& operator()(int) { return here; }
  SWIFTSPEC_HD const T& operator()(int) const { return here; }
#else
  T lanes[32];
  SWIFTSPEC_HD T& operator()(int lane) { return lanes[lane]; }
  SWIFTSPEC_HD const T& operator()(int lane) const { return lanes[lane]; }
#endif
};

template <int N, class T>
struct Regs {
  T r[N];
};
using FragmentA = PerLane<Regs<4, uint32_t>>;  // 16 x 16 of bfloat16, two to a register
using FragmentB = PerLane<Regs<2, uint32_t>>;  // 16 x 8
using FragmentC = PerLane<Regs<4, float>>;     // 16 x 8

// Where a lane's registers lie in the fragments of m16n8k16. A: register i holds row a_row, columns a_column and the
// next. B: register i holds rows b_row and the next, of column lane / 4. C: register i is row c_row, column c_column.
SWIFTSPEC_HD int a_row(int lane, int i) { return lane / 4 + i % 2 * 8; }
SWIFTSPEC_HD int a_column(int lane, int i) { return lane % 4 * 2 + i / 2 * 8; }
SWIFTSPEC_HD int b_row(int lane, int i) { return lane % 4 * 2 + i * 8; }
SWIFTSPEC_HD int b_column(int lane) { return lane / 4; }
SWIFTSPEC_HD int c_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
SWIFTSPEC_HD int c_column(int lane, int i) { return lane % 4 * 2 + i % 2; }

// bfloat16 by its bits; ties to even, and NaN stays NaN.
SWIFTSPEC_HD float widen(uint16_t x) { return noise::of_bits(static_cast<uint32_t>(x) << 16); }
SWIFTSPEC_HD uint16_t to_bf16(float x) {
  const uint32_t bits = noise::bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

SWIFTSPEC_HD int popcount(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

SWIFTSPEC_HD int lowest(uint32_t x) {  // of the bits set; there is one
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(x)) - 1;
#else
  return __builtin_ctz(x);
#endif
}

// Orders the lanes' accesses to shared memory.
SWIFTSPEC_HD void sync() {
#ifdef __CUDA_ARCH__
  __syncwarp();
#endif
}

SWIFTSPEC_HD uint32_t ballot(const PerLane<bool>& x) {
#ifdef __CUDA_ARCH__
  return __ballot_sync(0xffffffffu, x.here);
#else
  uint32_t word = 0;
  for (int lane = 0; lane < 32; ++lane) word |= static_cast<uint32_t>(x(lane)) << lane;
  return word;
#endif
}

template <class T>
SWIFTSPEC_HD T from_lane(const PerLane<T>& x, int lane) {
#ifdef __CUDA_ARCH__
  return __shfl_sync(0xffffffffu, x.here, lane);
#else
  return x(lane);
#endif
}

// Each lane's x as the lane before has it; lane 0 keeps its own.
template <class T>
SWIFTSPEC_HD PerLane<T> from_before(const PerLane<T>& x) {
  PerLane<T> out;
#ifdef __CUDA_ARCH__
  out.here = __shfl_up_sync(0xffffffffu, x.here, 1);
#else
  for (int lane = 0; lane < 32; ++lane) out(lane) = x(lane == 0 ? 0 : lane - 1);
#endif
  return out;
}

// Each lane's x as the lane `step` (a power of 2) away has it.
template <class T>
SWIFTSPEC_HD PerLane<T> exchanged(const PerLane<T>& x, int step) {
  PerLane<T> out;
#ifdef __CUDA_ARCH__
  out.here = __shfl_xor_sync(0xffffffffu, x.here, step);
#else
  for (int lane = 0; lane < 32; ++lane) out(lane) = x(lane ^ step);
#endif
  return out;
}

// x joined over all lanes by `join`, which commutes; always in the same order, and the same in every lane.
template <class T, class Join>
SWIFTSPEC_HD PerLane<T> joined(PerLane<T> x, Join join) {
  for (int step = 16; step > 0; step /= 2) {
    const PerLane<T> other = exchanged(x, step);
    SWIFTSPEC_EACH_LANE(lane) { x(lane) = join(x(lane), other(lane)); }
  }
  return x;
}

SWIFTSPEC_HD void multiply(FragmentC& c, const FragmentA& a, const FragmentB& b) {
#ifdef __CUDA_ARCH__
  ptx::mma_m16n8k16(c.here.r, a.here.r, b.here.r);
#else
  float left[16][16], right[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      left[a_row(lane, i)][a_column(lane, i)] = widen(static_cast<uint16_t>(a(lane).r[i]));
      left[a_row(lane, i)][a_column(lane, i) + 1] = widen(static_cast<uint16_t>(a(lane).r[i] >> 16));
    }
    for (int i = 0; i < 2; ++i) {
      right[b_row(lane, i)][b_column(lane)] = widen(static_cast<uint16_t>(b(lane).r[i]));
      right[b_row(lane, i) + 1][b_column(lane)] = widen(static_cast<uint16_t>(b(lane).r[i] >> 16));
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      float sum = c(lane).r[i];
      for (int k = 0; k < 16; ++k) sum += left[c_row(lane, i)][k] * right[k][c_column(lane, i)];
      c(lane).r[i] = sum;
    }
  }
#endif
}

// Four 8 x 8 matrices, of which each lane names a row: lane l row l % 8 of matrix l / 8. Register i of the fragment
// gets from matrix i row lane / 4, columns lane % 4 * 2 and the next; transposed, of its transpose.
template <bool kTransposed>
SWIFTSPEC_HD void load_matrices(FragmentA& a, const PerLane<const uint16_t*>& rows) {
#ifdef __CUDA_ARCH__
  ptx::ldmatrix_x4<kTransposed>(a.here.r, rows.here);
#else
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4, column = lane % 4 * 2;
      const uint16_t low = kTransposed ? rows(8 * i + column)[row] : rows(8 * i + row)[column];
      const uint16_t high = kTransposed ? rows(8 * i + column + 1)[row] : rows(8 * i + row)[column + 1];
      a(lane).r[i] = low | static_cast<uint32_t>(high) << 16;
    }
  }
#endif
}

// Eight bfloat16, moved as one.
struct alignas(16) Chunk {
  uint16_t x[8];
};

// From global to shared memory; there once `arrived` says so.
SWIFTSPEC_HD void fetch(Chunk* shared, const Chunk* global) {
#ifdef __CUDA_ARCH__
  ptx::cp_async16(shared, global);
#else
  *shared = *global;
#endif
}

// Ends a group of fetches; `arrived<N>` waits until at most N groups are under way, of this thread alone.
SWIFTSPEC_HD void end_fetches() {
#ifdef __CUDA_ARCH__
  ptx::cp_async_commit();
#endif
}
template <int N>
SWIFTSPEC_HD void arrived() {
#ifdef __CUDA_ARCH__
  ptx::cp_async_wait<N>();
#endif
}

}  // namespace swiftspec::warp
