#include "cuda/linear/norm.h"

#include <cuda_runtime.h>

#include "common/warp.h"
#include "cuda/launch.cuh"
#include "cuda/shared.cuh"

namespace swiftspec::cuda {
namespace {

using namespace norm;

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

void rms_norm(const void* x, const void* weight, float eps, int64_t rows, int64_t dim, void* out, Stream stream) {
  if (rows == 0) return;
  launch("rms_norm", rms_norm_kernel, {dim3(static_cast<unsigned>(rows)), kThreads}, stream,
         static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(weight), eps, dim, static_cast<uint16_t*>(out));
}

}  // namespace swiftspec::cuda
