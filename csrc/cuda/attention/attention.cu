#include "cuda/attention/attention.h"

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/shared.cuh"

namespace swiftspec::cuda {
namespace {

using namespace attention;
namespace cg = cooperative_groups;

__global__ void claim_kernel(const __grid_constant__ AttentionSetup a) {
  ptx::launch_dependents();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < a.rows) claim(a, row);
}

// What is known of a group while its rows are listed.
struct Seen {
  int base, keys;
};

// A block lists the rows of one group.
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ AttentionSetup a) {
  auto& [base, keys] = shared_variable<Seen>();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int thread = static_cast<int>(threadIdx.x);
  RowGroup group = rows_at(a, blockIdx.x);
  if (thread == 0) {
    base = INT32_MAX;
    keys = 0;
  }
  __syncthreads();
  for (int row = thread / 32; row < group.count; row += kWarps) {
    const auto run = static_cast<int>(list_row(a, group.first + row));
    if (thread % 32 == 0) {
      atomicMin(&base, run);
      atomicMax(&keys, a.count[group.first + row]);
    }
  }
  __syncthreads();
  if (thread == 0) {
    group.base = base;
    group.keys = keys;
    a.groups[blockIdx.x] = group;
  }
  for (int64_t head = thread; head < a.kv_heads; head += kThreads) a.arrived[blockIdx.x * a.kv_heads + head] = 0;
}

// Whether this cluster is the last of its group's `count`. All its threads ask, after they have written their part.
template <int kDim>
__device__ bool is_last(const Job& j, Shared<kDim>& s, cg::cluster_group& cluster, int64_t count) {
  cluster.sync();
  if (cluster.thread_rank() == 0) {
    __threadfence();  // for all: the barrier has put their writes before it
    uint32_t* arrived = j.setup.arrived + j.entry * j.setup.kv_heads + j.head;
    s.last = atomicAdd(arrived, 1u) == static_cast<uint32_t>(count - 1);
    if (s.last) *arrived = 0;  // for the next layer
    __threadfence();
  }
  cluster.sync();
  return cluster.map_shared_rank(&s, 0)->last != 0;
}

// Grid: (blocks of clusters that share the parts of a row, heads, clusters that share the groups). Every loop is the
// same for all blocks of a cluster, so that they meet at its barriers.
//
// It starts early, but lets nobody start before its end: with few heads it leaves many SMs idle, on which the blocks of
// the next projection would settle two by two, and stay so for their whole stream of weights. The projection in front
// of it has asked for the first of these weights instead (Weights::next).
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionSetup a, const uint16_t* qkv, uint16_t* keys, uint16_t* values,
                     uint16_t* out) {
  ptx::wait_for_dependencies();
  auto& s = *reinterpret_cast<Shared<kDim>*>(dynamic_shared());
  cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), thread = static_cast<int>(threadIdx.x);
  const int64_t clusters = gridDim.x / kCluster;
  int64_t held = -1;
  for (int64_t entry = blockIdx.z; entry < groups_of(a); entry += gridDim.z) {
    Job j{a, qkv, keys, values, out, blockIdx.y, a.groups[entry], entry, blockIdx.x / kCluster, 0};
    const int64_t count = parts(j.group.keys, kPart);
    if (j.group.count == 0 || j.part >= count) continue;
    if (j.part == 0) append<kDim>(j, rank, thread);
    load_queries(j, s, thread);
    for (; j.part < count; j.part += clusters) {
      j.tile = j.part * kCluster + rank;
      __syncthreads();
      if (j.first_key() < j.group.keys) {
        attend(j, s, held);
      } else if (thread < kColumns) {
        s.top[thread] = -INFINITY;
      }
      cluster.sync();
      const auto block = [&](int i) { return cluster.map_shared_rank(&s, i); };
      join_tiles<kDim>(j, rank, thread, count == 1, block);
      if (count > 1 && is_last(j, s, cluster, count)) join_parts<kDim>(j, rank, thread, count);
      // nobody reads another block's memory any more; at the end nothing is written there that would have to be seen
      const bool more = j.part + clusters < count || entry + gridDim.z < groups_of(a);
      more ? cluster.sync() : ptx::cluster_meet();
    }
  }
}

template <int kDim>
Launch launch_of(dim3 grid) {
  return {.grid = grid, .threads = kThreads, .cluster = kCluster, .shared = sizeof(Shared<kDim>), .early = true};
}

template <int kDim>
int64_t clusters_that_fit() {
  Launch how = launch_of<kDim>(kCluster);
  how.early = false;  // which does not change what fits
  allow_shared("attention", attention_kernel<kDim>, how.shared);
  return std::max(clusters_at_a_time("attention", attention_kernel<kDim>, how), 1);
}

// As many clusters as the device holds at a time, which `clusters_that_fit` was asked for: for each head first one for
// every group, then for parts of a row.
template <int kDim>
void launch_attention(const AttentionSetup& a, const void* qkv, void* keys, void* values, void* out, Stream stream) {
  const int64_t each = most(a.clusters / a.kv_heads, 1), z = least(each, groups_of(a));
  const int64_t x = least(each / z, parts(a.capacity, kPart));
  const dim3 grid(static_cast<unsigned>(x * kCluster), static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(z));
  launch("attention", attention_kernel<kDim>, launch_of<kDim>(grid), stream, a, static_cast<const uint16_t*>(qkv),
         static_cast<uint16_t*>(keys), static_cast<uint16_t*>(values), static_cast<uint16_t*>(out));
}

}  // namespace

int64_t attention_groups(int64_t rows, int64_t heads, int64_t kv_heads, bool one_sequence) {
  return one_sequence ? parts(rows, kColumns / (heads / kv_heads)) : rows;
}

int64_t attention_lines(int64_t rows, int64_t heads, int64_t capacity) { return rows * heads * parts(capacity, kPart); }

int64_t attention_clusters(int64_t dim) { return dim == 64 ? clusters_that_fit<64>() : clusters_that_fit<128>(); }

void prepare_attention(const AttentionSetup& a, Stream stream) {
  if (a.rows == 0) return;
  const dim3 blocks(static_cast<unsigned>(parts(a.rows, kThreads)));
  launch("prepare_attention", claim_kernel, {blocks, kThreads}, stream, a);
  const Launch how{.grid = dim3(static_cast<unsigned>(groups_of(a))), .threads = kThreads, .early = true};
  launch("prepare_attention", list_kernel, how, stream, a);
}

void attention(const AttentionSetup& a, const void* qkv, void* keys, void* values, void* out, Stream stream) {
  if (a.rows == 0) return;
  const auto run = a.dim == 64 ? launch_attention<64> : launch_attention<128>;
  run(a, qkv, keys, values, out, stream);
}

}  // namespace swiftspec::cuda
