#include "cuda/chains/verify.h"

#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/shared.cuh"

namespace swiftspec::cuda {
namespace {

using namespace chains;

// Grid: (the blocks of a cluster, positions, requests).
template <class T>
__global__ void __launch_bounds__(kThreads)
    verify_kernel(const __grid_constant__ VerifyArgs a) {
  Found& found = shared_variable<Found>();
  const int block = static_cast<int>(ptx::cluster_rank()), index = static_cast<int>(threadIdx.x) / 32;
  const int64_t position = blockIdx.y, request = blockIdx.z;
  const auto memory = [&](int i) { return ptx::in_block(&found, i); };
  read<T>(a, request, position, block, index, found);
  __syncthreads();
  if (threadIdx.x == 0) join_warps(found);
  ptx::cluster_sync();
  if (block == 0 && index == 0) {
    if (threadIdx.x == 0) {
      a.marks[request * (a.steps + 1) + position] = mark<T>(a, request, position, join_blocks(memory));
      __threadfence();
      found.last = atomicAdd(a.arrived + request, 1u) + 1 == gridDim.y;
      if (found.last) a.arrived[request] = 0;  // for the next launch
      __threadfence();
    }
    __syncwarp();
    if (found.last) decide(a, request, found);
  }
  ptx::cluster_sync();
  const Found& verdict = *memory(0);
  if (a.draft.data != nullptr && verdict.last) {
    read_again<T>(a, request, verdict, block, index, found);
    __syncthreads();
    if (threadIdx.x == 0) join_warps(found);
    ptx::cluster_sync();
    if (block == 0 && threadIdx.x == 0) a.bonus[request] = token_of(join_blocks(memory).best.index);
  }
  ptx::cluster_sync();  // nobody leaves while its memory is read
}

}  // namespace

void verify(const VerifyArgs& a, Stream stream) {
  if (a.batch == 0) return;
  const int cluster = sampling::blocks(device_here());
  const dim3 grid(static_cast<unsigned>(cluster), static_cast<unsigned>(positions(a)), static_cast<unsigned>(a.batch));
  const auto kernel = a.wide ? verify_kernel<float> : verify_kernel<uint16_t>;
  launch("verify", kernel, {.grid = grid, .threads = kThreads, .cluster = cluster}, stream, a);
}

}  // namespace swiftspec::cuda
