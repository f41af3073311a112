#include "cuda/attention/cache_ops.h"

#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/shared.cuh"

namespace swiftspec::cuda {
namespace {

using namespace rows;

__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveArgs a, uint8_t* values) {
  uint8_t* slots = (blockIdx.z == 0 ? a.region : values) + slots_of(a, blockIdx.y, blockIdx.x);
  for (int64_t base = threadIdx.x; base - threadIdx.x < pieces(a); base += kThreads * kEach) {
    Chunk held[kEach];
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int64_t piece = base + i * kThreads;
      if (piece < pieces(a)) held[i] = *reinterpret_cast<const Chunk*>(slots + from(a, piece));
    }
    __syncthreads();
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int64_t piece = base + i * kThreads;
      if (piece < pieces(a)) *reinterpret_cast<Chunk*>(slots + to(a, piece)) = held[i];
    }
    __syncthreads();
  }
}

__global__ void embed_kernel(const int64_t* tokens, const Chunk* table, int64_t chunks, Chunk* out) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int64_t row = blockIdx.x;
  for (int64_t i = threadIdx.x; i < chunks; i += blockDim.x) out[row * chunks + i] = table[tokens[row] * chunks + i];
}

__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(const uint16_t* x, const uint16_t* weight, float eps, int64_t dim, uint16_t* out) {
  float(&sums)[kThreads / 32] = shared_variable<float[kThreads / 32]>();
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x * dim;
  warp::PerLane<float> sum = {squares(x + row, dim, thread)};
  sum = warp::joined(sum, [](float a, float b) { return a + b; });
  if (thread % 32 == 0) sums[thread / 32] = sum(0);
  __syncthreads();
  float total = 0;
  for (const float one : sums) total += one;
  normalise(x + row, weight, rsqrtf(total / static_cast<float>(dim) + eps), dim, thread, out + row);
}

}  // namespace

void move_kv(const MoveArgs& keys, uint8_t* values, Stream stream) {
  if (keys.count == 0) return;
  const dim3 grid(static_cast<unsigned>(keys.kv_heads), static_cast<unsigned>(keys.layers), 2);
  launch("move_kv", move_kernel, {grid, kThreads}, stream, keys, values);
}

void embed(const int64_t* tokens, const void* table, int64_t rows, int64_t row_bytes, void* out, Stream stream) {
  if (rows == 0) return;
  const Launch how{.grid = dim3(static_cast<unsigned>(rows)), .threads = kThreads, .early = true};
  launch("embed", embed_kernel, how, stream, tokens, static_cast<const Chunk*>(table), row_bytes / 16,
         static_cast<Chunk*>(out));
}

void rms_norm(const void* x, const void* weight, float eps, int64_t rows, int64_t dim, void* out, Stream stream) {
  if (rows == 0) return;
  launch("rms_norm", rms_norm_kernel, {dim3(static_cast<unsigned>(rows)), kThreads}, stream,
         static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(weight), eps, dim, static_cast<uint16_t*>(out));
}

}  // namespace swiftspec::cuda
