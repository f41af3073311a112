#include <cuda_runtime.h>

#include <algorithm>

#include "kernels_host.h"
#include "cuda/launch.cuh"
#include "common/noise.h"

namespace swiftspec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

__global__ void noise_bits_kernel(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t vocab,
                                  int64_t total, uint32_t* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    const int64_t row = i / vocab;
    const uint32_t key = noise::row_key(seed, stream, static_cast<uint32_t>(positions[row]));
    out[i] = noise::bits(key, static_cast<uint32_t>(i - row * vocab));
  }
}

}  // namespace

void noise_bits(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, int64_t vocab,
                uint32_t* out, Stream cuda_stream) {
  const int64_t total = rows * vocab;
  if (total == 0) return;
  const auto blocks = static_cast<unsigned>(std::min((total + kThreads - 1) / kThreads, kMaxBlocks));
  launch("noise_bits", noise_bits_kernel, {dim3(blocks), kThreads}, cuda_stream, seed, stream, positions, vocab, total,
         out);
}

}  // namespace swiftspec::cuda
