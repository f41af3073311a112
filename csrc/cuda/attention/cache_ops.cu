#include "cuda/attention/cache_ops.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "common/bfloat16.h"
#include "cuda/launch.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

using namespace cache_ops;
using bf16::Vec8;

// Sources by value: a copy of them to the device would be one more operation, and wait for the stream.
struct MoveTask {
  MoveArgs keys;  // its `source` is not set
  uint8_t* values;
  int64_t source[kMaxMovedSlots];
};

// Grid: (heads, layers, keys and values).
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveTask task) {
  MoveArgs a = task.keys;
  a.source = task.source;
  uint8_t* slots = (blockIdx.z == 0 ? a.region : task.values) + slots_of(a, blockIdx.y, blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  for (int base = thread; base - thread < pieces(a); base += kThreads * kPiecesPerThread) {
    Vec8 held[kPiecesPerThread];
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kPiecesPerThread; ++i) {
      const int piece = base + i * kThreads;
      if (piece < pieces(a)) held[i] = *reinterpret_cast<const Vec8*>(slots + from(a, piece));
    }
    __syncthreads();
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kPiecesPerThread; ++i) {
      const int piece = base + i * kThreads;
      if (piece < pieces(a)) *reinterpret_cast<Vec8*>(slots + to(a, piece)) = held[i];
    }
    __syncthreads();
  }
}

}  // namespace

// Slots that a later launch reads lie behind all that an earlier one writes, since sources are not before their
// destinations.
void move_kv(const MoveArgs& keys, uint8_t* values, Stream stream) {
  const dim3 grid(static_cast<unsigned>(keys.kv_heads), static_cast<unsigned>(keys.layers), 2);
  for (int64_t done = 0; done < keys.count; done += kMaxMovedSlots) {
    MoveTask task{keys, values, {}};
    task.keys.source = nullptr;
    task.keys.start += done;
    task.keys.count = std::min(keys.count - done, kMaxMovedSlots);
    std::copy_n(keys.source + done, task.keys.count, task.source);
    launch("move_kv", move_kernel, {grid, kThreads}, stream, task);
  }
}

}  // namespace swiftspec::cuda
