// Two launches per case, one of them with a fault; prints the error of the emulated GPU, or "nothing".
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "cuda_runtime.h"
#include "simt/ptx.h"
#include "simt/shared.h"

namespace {

namespace ptx = swiftspec::ptx;
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
  ptx::bulk_load(dynamic_shared() + 4096, source, 16, reinterpret_cast<uint64_t*>(dynamic_shared()), 0, 0);
}

void misaligned(int) {
  auto* barrier = reinterpret_cast<uint64_t*>(dynamic_shared());
  if (threadIdx.x == 0) ptx::barrier_init(barrier);
  ptx::bulk_load(dynamic_shared() + 24, source, 16, barrier, 0, 0);
}

void gone(int) {
  if (ptx::cluster_rank() == 1) return;
  for (int i = 0; i < 1000; ++i) __nanosleep(1000);
  ptx::remote_load(reinterpret_cast<float*>(dynamic_shared()), 1);
}

void too_early(int) {  // no thread waits for the copy
  auto* barrier = reinterpret_cast<uint64_t*>(dynamic_shared());
  if (threadIdx.x != 0) return;
  ptx::barrier_init(barrier);
  for (int i = 1; i <= 8; ++i) {
    ptx::barrier_init(barrier + 2 * i);
    ptx::bulk_load(dynamic_shared() + 1024 + 16 * i, source, 16, barrier + 2 * i, 0, 0);
  }
}

void trapped(int) { __trap(); }

void late(int) {
  ptx::launch_dependents();
  for (int i = 0; i < 10; ++i) __nanosleep(1000);
  none(0);
}

void doubles(int) {  // reads what the previous launch wrote
  ptx::wait_for_dependencies();
  if (threadIdx.x == 0 && blockIdx.x == 0) result *= 2;
}

void hasty(int) {
  const float before = result;
  ptx::wait_for_dependencies();
  if (threadIdx.x == 0 && blockIdx.x == 0) result = 2 * before;
}

void heedless(int) {}

using Kernel = void (*)(int);
struct Case {
  Kernel kernel, early = doubles;
};
constexpr Case kCases[] = {{none}, {late},      {some_wait}, {apart},       {beyond},        {misaligned},
                           {gone}, {too_early}, {trapped},   {late, hasty}, {late, heedless}};

}  // namespace

int main(int, char** arguments) {
  const Case& one = kCases[std::atoi(arguments[1])];
  simt::Machine& machine = simt::Machine::get();
  machine.seed(static_cast<uint64_t>(std::atoi(arguments[2])));
  machine.queues = true;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {2, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{dim3(2), dim3(64), 4096, nullptr, attributes, 1};
  const cudaLaunchConfig_t early{dim3(2), dim3(64), 4096, nullptr, attributes, 2};
  try {
    cudaLaunchKernelEx(&config, one.kernel, 0);
    cudaLaunchKernelEx(&early, one.early, 0);
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return std::puts(cudaGetErrorString(error)), 0;
    if (result != 2 * 2 * 63 * 32) return std::puts("a wrong sum"), 0;
  } catch (const std::runtime_error& fault) {
    return std::puts(fault.what()), 0;
  }
  return std::puts("nothing"), 0;
}
