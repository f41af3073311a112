// Embedding lookup.
#include <cuda_runtime.h>

#include "common/bfloat16.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace swiftspec::cuda {
namespace {

using bf16::Vec8;

constexpr int kThreads = 256;

__global__ void embed_kernel(const int64_t* tokens, const Vec8* table, int64_t chunks, Vec8* out) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int64_t row = blockIdx.x;
  for (int64_t i = threadIdx.x; i < chunks; i += blockDim.x) out[row * chunks + i] = table[tokens[row] * chunks + i];
}

}  // namespace

void embed(const int64_t* tokens, const void* table, int64_t rows, int64_t row_bytes, void* out, Stream stream) {
  if (rows == 0) return;
  const Launch how{.grid = dim3(static_cast<unsigned>(rows)), .threads = kThreads, .early = true};
  launch("embed", embed_kernel, how, stream, tokens, static_cast<const Vec8*>(table), row_bytes / 16,
         static_cast<Vec8*>(out));
}

}  // namespace swiftspec::cuda
