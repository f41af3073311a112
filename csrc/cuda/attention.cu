#include "attention.h"

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "launch.cuh"
#include "ptx.cuh"

namespace swiftspec::cuda {
namespace {

using namespace attention;
namespace cg = cooperative_groups;

__global__ void claim_kernel(const __grid_constant__ AttentionPlan p) {
  ptx::launch_dependents();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < p.rows) claim(p, row);
}

// A block lists the rows of one group.
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ AttentionPlan p) {
  __shared__ int base, keys;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int thread = static_cast<int>(threadIdx.x);
  RowGroup group = rows_at(p, blockIdx.x);
  if (thread == 0) {
    base = INT32_MAX;
    keys = 0;
  }
  __syncthreads();
  for (int row = thread / 32; row < group.count; row += kWarps) {
    const auto run = static_cast<int>(list_row(p, group.first + row));
    if (thread % 32 == 0) {
      atomicMin(&base, run);
      atomicMax(&keys, p.count[group.first + row]);
    }
  }
  __syncthreads();
  if (thread == 0) {
    group.base = base;
    group.keys = keys;
    p.groups[blockIdx.x] = group;
  }
  for (int64_t head = thread; head < p.kv_heads; head += kThreads) p.arrived[blockIdx.x * p.kv_heads + head] = 0;
}

// Whether this cluster is the last of its group's `count`. All its threads ask, after they have written their part.
template <int kDim>
__device__ bool is_last(const Job& j, Shared<kDim>& s, cg::cluster_group& cluster, int64_t count) {
  __threadfence();
  cluster.sync();
  if (cluster.thread_rank() == 0) {
    uint32_t* arrived = j.p.arrived + j.entry * j.p.kv_heads + j.head;
    s.last = atomicAdd(arrived, 1u) == static_cast<uint32_t>(count - 1);
    if (s.last) *arrived = 0;  // for the next layer
    __threadfence();
  }
  cluster.sync();
  return cluster.map_shared_rank(&s, 0)->last != 0;
}

// Grid: (blocks of clusters that share the parts of a row, heads, clusters that share the groups). Every loop is the same
// for all blocks of a cluster, so that they meet at its barriers.
//
// It starts early, but lets nobody start before its end: with few heads it leaves many SMs idle, on which the blocks of the
// next projection would settle two by two, and stay so for their whole stream of weights. The projection in front of it
// has asked for the first of these weights instead (Weights::next).
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionPlan p, const uint16_t* qkv, uint16_t* keys, uint16_t* values,
                     uint16_t* out) {
  extern __shared__ __align__(16) uint8_t memory[];
  ptx::wait_for_dependencies();
  auto& s = *reinterpret_cast<Shared<kDim>*>(memory);
  cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), thread = static_cast<int>(threadIdx.x);
  const int64_t clusters = gridDim.x / kCluster;
  int64_t held = -1;
  for (int64_t entry = blockIdx.z; entry < groups_of(p); entry += gridDim.z) {
    Job j{p, qkv, keys, values, out, blockIdx.y, p.groups[entry], entry, blockIdx.x / kCluster, 0};
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
      cluster.sync();  // nobody reads another block's memory any more
    }
  }
}

template <int kDim>
cudaLaunchConfig_t config(cudaLaunchAttribute (&attributes)[2], dim3 grid, Stream stream) {
  check(cudaFuncSetAttribute(attention_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<kDim>)),
        "attention");
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1] = early();
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = sizeof(Shared<kDim>);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return config;
}

template <int kDim>
int64_t clusters_at_a_time() {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t launch = config<kDim>(attributes, kCluster, nullptr);
  launch.numAttrs = 1;  // how it is launched does not change what fits
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, attention_kernel<kDim>, &launch), "attention");
  return std::max(count, 1);
}

// As many clusters as the device holds at a time: for each head first one for every group, then for parts of a row.
template <int kDim>
void launch(const AttentionPlan& p, const void* qkv, void* keys, void* values, void* out, Stream stream) {
  const int64_t each = most(p.clusters / p.kv_heads, 1), z = least(each, groups_of(p));
  const int64_t x = least(each / z, parts(p.capacity, kPart));
  const dim3 grid(static_cast<unsigned>(x * kCluster), static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(z));
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t launch = config<kDim>(attributes, grid, stream);
  check(cudaLaunchKernelEx(&launch, attention_kernel<kDim>, p, static_cast<const uint16_t*>(qkv),
                           static_cast<uint16_t*>(keys), static_cast<uint16_t*>(values), static_cast<uint16_t*>(out)),
        "attention");
}

}  // namespace

int64_t attention_groups(int64_t rows, int64_t heads, int64_t kv_heads, bool one_sequence) {
  return one_sequence ? parts(rows, kColumns / (heads / kv_heads)) : rows;
}

int64_t attention_lines(int64_t groups, int64_t kv_heads, int64_t capacity) {
  return groups * kv_heads * parts(capacity, kPart) * kColumns;
}

int64_t attention_clusters(int64_t dim) { return dim == 64 ? clusters_at_a_time<64>() : clusters_at_a_time<128>(); }

void plan_attention(const AttentionPlan& p, Stream stream) {
  if (p.rows == 0) return;
  claim_kernel<<<static_cast<unsigned>(parts(p.rows, kThreads)), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "plan_attention");
  launch_early("plan_attention", list_kernel, dim3(static_cast<unsigned>(groups_of(p))), kThreads, stream, p);
}

void attention(const AttentionPlan& p, const void* qkv, void* keys, void* values, void* out, Stream stream) {
  if (p.rows == 0) return;
  p.dim == 64 ? launch<64>(p, qkv, keys, values, out, stream) : launch<128>(p, qkv, keys, values, out, stream);
}

}  // namespace swiftspec::cuda
