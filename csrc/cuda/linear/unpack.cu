#include "cuda/linear/unpack.h"

#include <cuda_runtime.h>

#include "cuda/launch.cuh"

namespace swiftspec::cuda {
namespace {

using tiles::kThreads;

template <bool kInt4>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ tiles::Tiling tiling, const uint32_t* words, tiles::Strips strips,
                  uint16_t* out) {
  const int warp = static_cast<int>(blockIdx.x * tiles::kWarps + threadIdx.x / 32);
  if (warp < strips.tiles(tiling)) {
    tiles::unpack_tile<kInt4>(tiling, words, strips, warp, static_cast<int>(threadIdx.x % 32), out);
  }
}

}  // namespace

void unpack_rows(const Weights& weights, int64_t first, int64_t half, void* out, Stream stream) {
  const tiles::Strips strips = tiles::strips_of(first, half);
  const int64_t blocks = tiles::ceil_div(strips.tiles(weights.tiling), tiles::kWarps);
  const auto kernel = weights.tiling.group != 0 ? unpack_kernel<true> : unpack_kernel<false>;
  launch("expand", kernel, {dim3(static_cast<unsigned>(blocks)), kThreads}, stream, weights.tiling,
         static_cast<const uint32_t*>(weights.data), strips, static_cast<uint16_t*>(out));
}

}  // namespace swiftspec::cuda
