#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/sampling/top_few.h"
#include "cuda/shared.cuh"

namespace swiftspec::cuda {
namespace {

using namespace sampling;

// Merges the first `count` lists, a power of 2, into the first one. All threads of the block call it.
__device__ void merge_lists(Entry<float> (*lists)[32], int count, int warp_index) {
  for (int step = 1; step < count; step *= 2) {
    __syncthreads();
    if (warp_index < count && warp_index % (2 * step) == 0) merge_round(lists, step, warp_index);
  }
}

// k is at most kFew. The last warp adds the sums while the others merge lists.
__global__ void __launch_bounds__(kThreads)
    children_kernel(const __grid_constant__ ScoreArgs args, int k, int64_t* tokens, float* values) {
  TopFew& found = shared_variable<TopFew>();
  ptx::launch_dependents();
  ptx::cluster_meet();  // no block's memory is written before it has started
  ptx::wait_for_dependencies();
  const int block = static_cast<int>(ptx::cluster_rank()), thread = static_cast<int>(threadIdx.x), index = thread / 32;
  const int64_t row = blockIdx.y;
  const bool sums = values != nullptr, adds = sums && thread == kThreads - 1;
  scan_few(args, row, k, block, index, sums, found);
  TopFew& all = *ptx::in_block(&found, 0);
  __syncthreads();
  if (adds) all.block_sums[block] = add_all(found.warp_sums, kWarps);
  merge_lists(found.warps, kWarps, index);
  if (index == 0) store(load(found.warps[0]), all.blocks[block]);
  ptx::cluster_sync();
  if (block != 0) return;
  if (adds) found.sum = add_all(found.block_sums, kBlocks);
  merge_lists(found.blocks, kBlocks, index);
  __syncthreads();
  if (thread < k) {
    const Entry<float> child = found.blocks[0][thread];
    const LogSum sum = sums ? found.sum : LogSum{};
    write_child(thread, child.value, child.index, sum, tokens + row * k, sums ? values + row * k : nullptr);
  }
}

// For any k.
__global__ void __launch_bounds__(kThreads)
    many_children_kernel(const __grid_constant__ ScoreArgs args, int k, int64_t* tokens, float* values) {
  BlockResult& found = shared_variable<BlockResult>();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int block = static_cast<int>(ptx::cluster_rank()), index = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = blockIdx.y;
  scan_columns(args, row, k, block, index, values != nullptr, found);
  __syncthreads();
  if (index == 0) reduce_warps(k, found);
  ptx::cluster_sync();
  if (index == 0 && block == 0) {
    const auto memory = [&](int i) { return ptx::in_block(&found, i); };
    reduce_blocks(k, memory, tokens + row * k, values == nullptr ? nullptr : values + row * k);
  }
  ptx::cluster_sync();  // no block exits while its memory is read
}

// If `keys` is null, `tokens` is an input.
__global__ void __launch_bounds__(kThreads)
    draw_keyed_kernel(const __grid_constant__ ScoreArgs args, const uint32_t* keys, int64_t* tokens, float* log_probs) {
  BlockResult& found = shared_variable<BlockResult>();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int block = static_cast<int>(ptx::cluster_rank()), index = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = blockIdx.y;
  scan_keyed(args, row, keys == nullptr ? nullptr : keys + row, block, index, found);
  __syncthreads();
  if (index == 0) reduce_warps(1, found);
  ptx::cluster_sync();
  if (index == 0 && block == 0) {
    const auto memory = [&](int i) { return ptx::in_block(&found, i); };
    reduce_keyed(args, row, keys != nullptr, memory, tokens + row, log_probs + row);
  }
  ptx::cluster_sync();  // no block exits while its memory is read
}

// Launches one cluster per row.
template <class... Parameters, class... Arguments>
void launch_rows(const char* name, void (*kernel)(ScoreArgs, Parameters...), const ScoreArgs& args, Stream stream,
                 Arguments... rest) {
  if (args.rows == 0) return;
  const int cluster = cluster_blocks(device_info());
  const dim3 grid(static_cast<unsigned>(cluster), static_cast<unsigned>(args.rows));
  const Launch how{.grid = grid, .threads = kThreads, .cluster = cluster, .early = true};
  launch(name, kernel, how, stream, args, rest...);
}

}  // namespace

void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, Stream stream) {
  launch_rows("children", k <= kFew ? children_kernel : many_children_kernel, args, stream, static_cast<int>(k), tokens, values);
}

void draw_keyed(const ScoreArgs& args, const uint32_t* keys, int64_t* tokens, float* log_probs, Stream stream) {
  launch_rows("draw_keyed", draw_keyed_kernel, args, stream, keys, tokens, log_probs);
}

}  // namespace swiftspec::cuda
