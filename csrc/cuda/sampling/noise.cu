// Gumbel noise for rows of a vocabulary.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/gumbel.h"
#include "common/noise.h"
#include "cuda/launch.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void gumbel_rows_kernel(uint64_t seed, uint32_t stream, const int64_t* positions, uint32_t first,
                                   int64_t count, float* out) {
  const uint32_t key = noise::row_key(seed, stream, static_cast<uint32_t>(positions[blockIdx.y]));
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    out[blockIdx.y * count + i] = noise::gumbel_exact(noise::bits(key, first + static_cast<uint32_t>(i)));
  }
}

unsigned blocks_for(int64_t elements, int64_t most) {
  return static_cast<unsigned>(std::min((elements + kThreads - 1) / kThreads, most));
}

}  // namespace

void gumbel_rows(uint64_t seed, uint32_t noise_stream, const int64_t* positions, int64_t rows, uint32_t first,
                 int64_t count, float* out, Stream stream) {
  constexpr int64_t kMaxBlocks = 1024;  // per row
  if (rows == 0 || count == 0) return;
  const dim3 grid(blocks_for(count, kMaxBlocks), static_cast<unsigned>(rows));
  launch("gumbel_rows", gumbel_rows_kernel, {grid, kThreads}, stream, seed, noise_stream, positions, first, count, out);
}

}  // namespace swiftspec::cuda
