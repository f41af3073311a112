// Kernels with a fault each, by number: what the emulated GPU says of it, or "nothing".
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "cuda_runtime.h"
#include "simt/ptx.h"
#include "simt/shared.h"

namespace {

namespace ptx = swiftspec::cuda::ptx;
using swiftspec::cuda::dynamic_shared;

float result;
alignas(16) float source[4];

void none(int) {  // every thread adds its number, over shuffles, a barrier and the other block's memory
  auto* sums = reinterpret_cast<float*>(dynamic_shared());
  float sum = static_cast<float>(threadIdx.x);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  ptx::cluster_sync();
  if (threadIdx.x == 0 && ptx::cluster_rank() == 0) {
    result = 0;
    for (uint32_t rank = 0; rank < 2; ++rank) result += ptx::remote_load(sums, rank) + ptx::remote_load(sums + 1, rank);
  }
  ptx::cluster_sync();
}

void some_wait(int) {
  if (threadIdx.x != 3) __syncwarp();
}

void apart(int) {
  if (threadIdx.x % 2 == 0) return __syncwarp();
  __ballot_sync(0xffffffffu, true);
}

void beyond(int) {
  ptx::bulk_load(dynamic_shared() + 4096, source, 16, reinterpret_cast<uint64_t*>(dynamic_shared()), 0);
}

void misaligned(int) {
  auto* barrier = reinterpret_cast<uint64_t*>(dynamic_shared());
  if (threadIdx.x == 0) ptx::barrier_init(barrier);
  ptx::bulk_load(dynamic_shared() + 24, source, 16, barrier, 0);
}

void gone(int) {
  if (ptx::cluster_rank() == 1) return;
  for (int i = 0; i < 1000; ++i) __nanosleep(1000);
  ptx::remote_load(reinterpret_cast<float*>(dynamic_shared()), 1);
}

void too_early(int) {  // nobody waits for the copy
  auto* barrier = reinterpret_cast<uint64_t*>(dynamic_shared());
  if (threadIdx.x != 0) return;
  ptx::barrier_init(barrier);
  for (int i = 1; i <= 8; ++i) {
    ptx::barrier_init(barrier + 2 * i);
    ptx::bulk_load(dynamic_shared() + 1024 + 16 * i, source, 16, barrier + 2 * i, 0);
  }
}

void trapped(int) { __trap(); }

using Kernel = void (*)(int);
constexpr Kernel kKernels[] = {none, some_wait, apart, beyond, misaligned, gone, too_early, trapped};

}  // namespace

int main(int, char** arguments) {
  const int which = std::atoi(arguments[1]);
  simt::Machine::get().seed(static_cast<uint64_t>(std::atoi(arguments[2])));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{dim3(2), dim3(64), 4096, nullptr, &cluster, 1};
  try {
    const cudaError_t error = cudaLaunchKernelEx(&config, kKernels[which], 0);
    const cudaError_t after = cudaGetLastError();
    if (error != cudaSuccess || after != cudaSuccess) return std::puts(cudaGetErrorString(after)), 0;
    if (result != 2 * 63 * 32) return std::puts("a wrong sum"), 0;
  } catch (const std::runtime_error& fault) {
    return std::puts(fault.what()), 0;
  }
  return std::puts("nothing"), 0;
}
