// Systematic resampling of groups of particles, from weights to copied rows, in one launch of a fixed grid. The
// arithmetic is in common/resample.h.
//
// A cluster of 8 blocks (without clusters: one block) processes a group. Each block normalises all weights redundantly,
// with identical results: exponentials in parallel, sums in the order of the rows. Then each block copies every eighth
// row in place. A particle that is copied keeps its own row, so no block reads a row that another block writes.
#include <cuda_runtime.h>

#include "common/ieee.h"
#include "common/resample.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/sampling/sampling.h"
#include "cuda/shared.cuh"

namespace swiftspec::cuda {
namespace {

constexpr int kThreads = 256;

// Weights of a group and the result of resampling, in the shared memory of a block.
struct GroupWeights {
  double weights[kMaxParticles], shares[kMaxParticles];
  int64_t source[kMaxParticles];
  double log_sum, ess;  // log of the sum of all weights; effective sample size
  bool resamples;
};

// shares[i] = e^(weights[i] - offset).
__device__ void exponentiate(GroupWeights& found, int64_t count, double offset) {
  for (int64_t i = threadIdx.x; i < count; i += kThreads) found.shares[i] = exp(found.weights[i] - offset);
  __syncthreads();
}

__device__ void weigh_group(const ResampleArgs& a, int64_t group, GroupWeights& found) {
  const int64_t n = a.count;
  const bool first = threadIdx.x == 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) found.weights[i] = a.log_weights[group * n + i];
  __syncthreads();
  if (first) found.log_sum = resample::max_weight(found.weights, n);
  __syncthreads();
  const double top = found.log_sum;
  exponentiate(found, n, top);
  if (first) found.log_sum = ieee::add(top, log(resample::sum(found.shares, n)));
  __syncthreads();
  exponentiate(found, n, found.log_sum);
  if (first) {
    found.ess = resample::effective_sample_size(found.shares, n);
    found.resamples = found.ess < ieee::mul(a.threshold, static_cast<double>(n));
    if (found.resamples) resample::systematic_resampling(found.shares, n, a.uniform[group], found.source);
  }
  __syncthreads();
}

// Copies a thread's share of `bytes` bytes, eight at a time if both addresses and the size are multiples of eight.
__device__ void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const bool eights = ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) & 7) == 0;
  if (eights) {
    auto* words = reinterpret_cast<uint64_t*>(to);
    const auto* given = reinterpret_cast<const uint64_t*>(from);
    for (int64_t i = threadIdx.x; i < bytes / 8; i += kThreads) words[i] = given[i];
  } else {
    for (int64_t i = threadIdx.x; i < bytes; i += kThreads) to[i] = from[i];
  }
}

// Copies the state of one particle to another row.
__device__ void copy_row(const ResampleArgs& a, int64_t from, int64_t to) {
  copy(a.mask + to * a.slots, a.mask + from * a.slots, a.width);
  copy(a.ends + to * a.ends_bytes, a.ends + from * a.ends_bytes, a.ends_bytes);
  copy(a.path + to * a.path_bytes, a.path + from * a.path_bytes, a.path_bytes);
}

__global__ void __launch_bounds__(kThreads) resample_kernel(const __grid_constant__ ResampleArgs a) {
  GroupWeights& found = shared_variable<GroupWeights>();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const auto block = static_cast<int64_t>(ptx::cluster_rank());
  const int64_t group = blockIdx.y, first = group * a.count;
  weigh_group(a, group, found);
  ptx::cluster_sync();  // all blocks of the cluster have read the weights
  if (block == 0 && threadIdx.x == 0) {
    a.ess[group] += found.ess;
    a.rounds[group] += 1;
    if (found.resamples) {
      a.log_z[group] += found.log_sum - log(static_cast<double>(a.count));
      a.resampled[group] += 1;
    }
  }
  if (!found.resamples) return;
  if (block == 0) {
    for (int64_t i = threadIdx.x; i < a.count; i += kThreads) a.log_weights[first + i] = 0.0;
  }
  for (int64_t row = block; row < a.count; row += sampling::kBlocks) {
    if (found.source[row] != row) copy_row(a, first + found.source[row], first + row);
  }
}

}  // namespace

void resample(const ResampleArgs& a, Stream stream) {
  if (a.groups == 0) return;
  const int cluster = sampling::cluster_blocks(device_info());
  const dim3 grid(static_cast<unsigned>(cluster), static_cast<unsigned>(a.groups));
  const Launch how{.grid = grid, .threads = kThreads, .cluster = cluster, .early = true};
  launch("resample", resample_kernel, how, stream, a);
}

}  // namespace swiftspec::cuda
