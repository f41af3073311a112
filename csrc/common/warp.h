// Warp-level code for host and device: on a device each lane runs it, on a CPU a loop over the lanes does. So tests run
// every index, fragment and shuffle of a kernel under sanitizers. PerLane holds the value of each lane between steps.
#pragma once

#include <cstdint>

#include "common/host_device.h"

#ifdef __CUDA_ARCH__
#define SWIFTSPEC_EACH_LANE(lane) if (const int lane = static_cast<int>(threadIdx.x) & 31; true)
#else
#define SWIFTSPEC_EACH_LANE(lane) for (int lane = 0; lane < 32; ++lane)
#endif

namespace swiftspec::warp {

template <class T>
struct PerLane {
#ifdef __CUDA_ARCH__
  T value;
  SWIFTSPEC_HD T& operator()(int) { return value; }
  SWIFTSPEC_HD const T& operator()(int) const { return value; }
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

SWIFTSPEC_HD int popcount(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

SWIFTSPEC_HD int lowest_bit(uint32_t x) {  // index of the lowest set bit; x is not 0
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(x)) - 1;
#else
  return __builtin_ctz(x);
#endif
}

// Orders the accesses of the lanes to shared memory.
SWIFTSPEC_HD void sync() {
#ifdef __CUDA_ARCH__
  __syncwarp();
#endif
}

SWIFTSPEC_HD uint32_t ballot(const PerLane<bool>& x) {
#ifdef __CUDA_ARCH__
  return __ballot_sync(0xffffffffu, x.value);
#else
  uint32_t word = 0;
  for (int lane = 0; lane < 32; ++lane) word |= static_cast<uint32_t>(x(lane)) << lane;
  return word;
#endif
}

template <class T>
SWIFTSPEC_HD T shuffle(const PerLane<T>& x, int lane) {
#ifdef __CUDA_ARCH__
  return __shfl_sync(0xffffffffu, x.value, lane);
#else
  return x(lane);
#endif
}

// Lane i receives the x of lane i - step; the first `step` lanes keep their own.
template <class T>
SWIFTSPEC_HD PerLane<T> shuffle_up(const PerLane<T>& x, int step = 1) {
  PerLane<T> out;
#ifdef __CUDA_ARCH__
  out.value = __shfl_up_sync(0xffffffffu, x.value, step);
#else
  for (int lane = 0; lane < 32; ++lane) out(lane) = x(lane < step ? lane : lane - step);
#endif
  return out;
}

// Lane i receives the x of lane i ^ step; step is a power of 2.
template <class T>
SWIFTSPEC_HD PerLane<T> shuffle_xor(const PerLane<T>& x, int step) {
  PerLane<T> out;
#ifdef __CUDA_ARCH__
  out.value = __shfl_xor_sync(0xffffffffu, x.value, step);
#else
  for (int lane = 0; lane < 32; ++lane) out(lane) = x(lane ^ step);
#endif
  return out;
}

// Butterfly reduction of x over all lanes by the commutative function `combine`, in a fixed order; every lane receives
// the result.
template <class T, class Combine>
SWIFTSPEC_HD PerLane<T> all_reduce(PerLane<T> x, Combine combine) {
  for (int step = 16; step > 0; step /= 2) {
    const PerLane<T> other = shuffle_xor(x, step);
    SWIFTSPEC_EACH_LANE(lane) { x(lane) = combine(x(lane), other(lane)); }
  }
  return x;
}

}  // namespace swiftspec::warp
