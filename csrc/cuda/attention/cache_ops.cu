#include "cuda/attention/cache_ops.h"

#include <cuda_runtime.h>

#include "common/bfloat16.h"
#include "cuda/launch.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

using namespace cache_ops;
using bf16::Vec8;

// Grid: (heads, layers, keys and values).
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveArgs a, uint8_t* values) {
  uint8_t* slots = (blockIdx.z == 0 ? a.region : values) + slots_of(a, blockIdx.y, blockIdx.x);
  for (int64_t base = threadIdx.x; base - threadIdx.x < pieces(a); base += kThreads * kPiecesPerThread) {
    Vec8 held[kPiecesPerThread];
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kPiecesPerThread; ++i) {
      const int64_t piece = base + i * kThreads;
      if (piece < pieces(a)) held[i] = *reinterpret_cast<const Vec8*>(slots + from(a, piece));
    }
    __syncthreads();
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kPiecesPerThread; ++i) {
      const int64_t piece = base + i * kThreads;
      if (piece < pieces(a)) *reinterpret_cast<Vec8*>(slots + to(a, piece)) = held[i];
    }
    __syncthreads();
  }
}

}  // namespace

void move_kv(const MoveArgs& keys, uint8_t* values, Stream stream) {
  if (keys.count == 0) return;
  const dim3 grid(static_cast<unsigned>(keys.kv_heads), static_cast<unsigned>(keys.layers), 2);
  launch("move_kv", move_kernel, {grid, kThreads}, stream, keys, values);
}

}  // namespace swiftspec::cuda
