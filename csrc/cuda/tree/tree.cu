#include "cuda/tree/tree.h"

#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace swiftspec::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads, 1)  // the 1 allows enough registers to avoid spills
    leaves_kernel(const __grid_constant__ TreeState tree, int32_t w, const int64_t* prefix,
                  const __grid_constant__ Expansion out) {
  const int index = static_cast<int>(threadIdx.x) / 32;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  if (index == 0) tree::select_leaves(tree, w, prefix, out);
  __syncthreads();
  for (int row = index; row < w; row += kThreads / 32) tree::write_mask_row(tree, row, prefix, out);
}

__global__ void __launch_bounds__(kThreads)
    add_kernel(const __grid_constant__ TreeState tree, int32_t w, const int32_t* node, int32_t k,
               const int64_t* tokens, const float* values) {
  ptx::wait_for_dependencies();
  for (int i = static_cast<int>(threadIdx.x); i < w * k; i += kThreads) {
    tree::add_child(tree, node, k, i / k, i % k, tokens, values);
  }
  __syncthreads();
  if (threadIdx.x == 0) tree::count_children(tree, node, w, k);
}

__global__ void __launch_bounds__(kThreads)
    root_kernel(const __grid_constant__ TreeState tree, const int64_t* token, const int64_t* slot, int64_t* region,
                int32_t k, const int64_t* tokens, const float* values) {
  ptx::wait_for_dependencies();
  tree::write_root(tree, *token, k, tokens, values, static_cast<int>(threadIdx.x), kThreads);
  if (threadIdx.x != 0) return;
  region[0] = *slot;
  region[1] = *slot + tree.slots;
}

}  // namespace

void tree_leaves(const TreeState& tree, int32_t w, const int64_t* prefix, const Expansion& out, Stream stream) {
  const Launch how{.grid = dim3(1), .threads = kThreads, .early = true};
  launch("tree_leaves", leaves_kernel, how, stream, tree, w, prefix, out);
}

void tree_add(const TreeState& tree, int32_t w, const int32_t* node, int32_t k, const int64_t* tokens,
              const float* values, Stream stream) {
  const Launch how{.grid = dim3(1), .threads = kThreads, .early = true};
  launch("tree_add", add_kernel, how, stream, tree, w, node, k, tokens, values);
}

void tree_root(const TreeState& tree, const int64_t* token, const int64_t* slot, int64_t* region, int32_t k,
               const int64_t* tokens, const float* values, Stream stream) {
  const Launch how{.grid = dim3(1), .threads = kThreads, .early = true};
  launch("tree_root", root_kernel, how, stream, tree, token, slot, region, k, tokens, values);
}

}  // namespace swiftspec::cuda
