#include "cuda/chains/verify.h"

#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/shared.cuh"

namespace swiftspec::cuda {
namespace {

using namespace chains;

// Grid: (blocks of a cluster, positions, requests). The 1 of the launch bounds allows enough registers to spill none.
template <class T>
__global__ void __launch_bounds__(kThreads, 1) verify_chains_kernel(const __grid_constant__ VerifyChainsArgs a) {
  ClusterResult& found = shared_variable<ClusterResult>();
  const int block = static_cast<int>(ptx::cluster_rank()), index = static_cast<int>(threadIdx.x) / 32;
  const int64_t position = blockIdx.y, request = blockIdx.z;
  const auto memory = [&](int i) { return ptx::in_block(&found, i); };
  scan<T>(a, request, position, block, index, found);
  __syncthreads();
  if (threadIdx.x == 0) reduce_warps(found);
  ptx::cluster_sync();
  if (block == 0 && index == 0) {
    if (threadIdx.x == 0) {
      a.marks[request * (a.steps + 1) + position] = mark<T>(a, request, position, reduce_blocks(memory));
      __threadfence();
      found.last = atomicAdd(a.arrived + request, 1u) + 1 == gridDim.y;
      if (found.last) a.arrived[request] = 0;  // for the next launch
      __threadfence();
    }
    __syncwarp();
    if (found.last) count_accepted(a, request, found);
  }
  ptx::cluster_sync();
  const ClusterResult& verdict = *memory(0);
  if (a.draft.data != nullptr && verdict.last) {
    scan_bonus<T>(a, request, verdict, block, index, found);
    __syncthreads();
    if (threadIdx.x == 0) reduce_warps(found);
    ptx::cluster_sync();
    if (block == 0 && threadIdx.x == 0) a.bonus[request] = token_of(reduce_blocks(memory).best);
  }
  ptx::cluster_sync();  // no block exits while its memory is read
}

}  // namespace

void verify_chains(const VerifyChainsArgs& a, Stream stream) {
  if (a.batch == 0) return;
  const int cluster = sampling::cluster_blocks(device_info());
  const dim3 grid(static_cast<unsigned>(cluster), static_cast<unsigned>(positions(a)), static_cast<unsigned>(a.batch));
  const auto kernel = a.wide ? verify_chains_kernel<float> : verify_chains_kernel<uint16_t>;
  launch("verify_chains", kernel, {.grid = grid, .threads = kThreads, .cluster = cluster}, stream, a);
}

}  // namespace swiftspec::cuda
