#include "cuda/linear/repack.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"

namespace swiftspec::cuda {
namespace {

using tiles::kThreads;

__global__ void repack_int4_kernel(tiles::Tiling tiling, tiles::Int4Source source, uint32_t* out) {
  const int64_t words = tiling.bytes() / 4, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
    out[i] = tiles::int4_word(tiling, source, i);
  }
}

__global__ void repack_bf16_kernel(tiles::Tiling tiling, const uint16_t* matrix, uint32_t* out) {
  const int64_t words = tiling.bytes() / 4, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
    out[i] = tiles::bf16_word(tiling, matrix, i);
  }
}

Launch repack_of(const tiles::Tiling& tiling) {
  constexpr int64_t kMaxBlocks = 2048;
  const int64_t blocks = tiles::ceil_div(tiling.bytes() / 4, kThreads);
  return {dim3(static_cast<unsigned>(std::min(blocks, kMaxBlocks))), kThreads};
}

}  // namespace

void repack_int4(const tiles::Tiling& tiling, const tiles::Int4Source& source, void* out, Stream stream) {
  launch("repack_int4", repack_int4_kernel, repack_of(tiling), stream, tiling, source, static_cast<uint32_t*>(out));
}

void repack_bf16(const tiles::Tiling& tiling, const uint16_t* matrix, void* out, Stream stream) {
  launch("repack_bf16", repack_bf16_kernel, repack_of(tiling), stream, tiling, matrix, static_cast<uint32_t*>(out));
}

}  // namespace swiftspec::cuda
