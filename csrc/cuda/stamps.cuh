// Stamps: the clock of each warp at kPoints points of a kernel, and page touches. Both serve measurements
// (bench/gpu/stamps.py, bench/gpu/footprint.py) and exist only in builds with SWIFTSPEC_STAMPS; in other builds
// SWIFTSPEC_STAMP is an empty statement, and the kernels have the same instructions as without it.
#pragma once

// Writes the clock of this warp to the record of `point` of its launch. `arguments` has the member `stamps`. Functions
// that are compiled for the host as well have no stamps there.
#if defined(SWIFTSPEC_STAMPS) && defined(__CUDA_ARCH__)
#define SWIFTSPEC_STAMP(arguments, point) \
  ::swiftspec::cuda::stamps::stamp((arguments).stamps, ::swiftspec::cuda::stamps::point)
#else
#define SWIFTSPEC_STAMP(arguments, point) static_cast<void>(0)
#endif

#ifdef SWIFTSPEC_STAMPS

#include <cstdint>

#include "cuda/ptx.cuh"
#include "cuda/stamps.h"

namespace swiftspec::cuda::stamps {

#ifdef __CUDACC__
__device__ inline uint64_t clock_now() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}
__device__ inline uint32_t multiprocessor() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}
__device__ inline void touch(const uint8_t* page) {
  uint32_t byte;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(page) : "memory");
}
#else  // the emulated GPU
inline uint64_t clock_now() { return ptx::nanoseconds(); }
inline uint32_t multiprocessor() { return 0; }
inline void touch(const uint8_t*) {}
#endif

__device__ inline uint64_t block_index() {
  return blockIdx.x + static_cast<uint64_t>(gridDim.x) * (blockIdx.y + static_cast<uint64_t>(gridDim.y) * blockIdx.z);
}

// Lane 0 of each warp writes; the address is computed again at each point, so that it occupies no registers in between.
__device__ inline void stamp(uint64_t* launch, int point) {
  if (launch == nullptr || threadIdx.x % 32 != 0) return;
  uint64_t* record = launch + (block_index() * (blockDim.x / 32) + threadIdx.x / 32) * kRecordWords;
  if (point == kStart) {
    record[kPoints] = ptx::nanoseconds();
    record[kPoints + 1] = block_index() << 32 | multiprocessor();
  }
  record[point] = clock_now();
}

// Loads one byte of each page, so that the translations of their addresses are cached. Each block loads all of them.
__device__ inline void touch_pages(const uint8_t* first, int64_t bytes) {
  for (int64_t at = threadIdx.x * kPageBytes; at < bytes; at += blockDim.x * kPageBytes) touch(first + at);
}

}  // namespace swiftspec::cuda::stamps

#endif
