#include "cuda/attention/attention.h"

#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/shared.cuh"

namespace swiftspec::cuda {
namespace {

using namespace attention;

constexpr int kListThreads = 256, kRopeThreads = 128;

// Reduction over the rows of a group: minimum of the shared leading slots, maximum of the keys.
struct GroupExtent {
  int base, keys;
};

// A block lists the keys of the rows of one group.
__global__ void __launch_bounds__(kListThreads) list_keys_kernel(const __grid_constant__ AttentionSetup a) {
  auto& [base, keys] = shared_variable<GroupExtent>();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int thread = static_cast<int>(threadIdx.x);
  RowGroup group = group_rows_at(a, static_cast<int>(blockIdx.x));
  if (thread == 0) {
    base = INT32_MAX;
    keys = 0;
  }
  __syncthreads();
  for (int row = thread / 32; row < group.count; row += kListThreads / 32) {
    const int run = list_keys(a, group.first + row);
    if (thread % 32 == 0) {
      atomicMin(&base, run);
      atomicMax(&keys, a.count[group.first + row]);
    }
  }
  __syncthreads();
  if (thread == 0) {
    group.base = base;
    group.keys = keys;
    if (group.count > 0) group.window = window_start(a, sequence_of(a, group.first));
    a.groups[blockIdx.x] = group;
  }
  for (int64_t head = thread; head < a.kv_heads; head += kListThreads) a.arrived[blockIdx.x * a.kv_heads + head] = 0;
}

// Whether this cluster is the last of the `count` clusters of its group to finish. All threads of the cluster call it,
// after they have written their part.
template <class F>
__device__ bool is_last(const TileTask<F>& j, SharedMemory<F>& s, int rank, int thread, int count) {
  ptx::cluster_sync();
  if (rank == 0 && thread == 0) {
    __threadfence();  // for all threads: the barrier has ordered their writes before it
    uint32_t* arrived = j.setup.arrived + static_cast<int64_t>(j.entry) * j.setup.kv_heads + j.head;
    s.last = atomicAdd(arrived, 1u) == static_cast<uint32_t>(count - 1);
    if (s.last) *arrived = 0;  // for the next layer
    __threadfence();
  }
  ptx::cluster_sync();
  return ptx::in_block(&s, 0)->last != 0;
}

// Computes a part by a cluster; without clusters the block processes its tiles sequentially. `next_part` is the part
// that the cluster computes after this one, or -1.
template <class F, class Work>
__device__ void attend_part(TileTask<F>& j, SharedMemory<F>& s, int rank, int thread, bool alone, int next_part,
                            StageState& stage_state, Work overlapped_work) {
  const int first = j.part * j.part_keys(), keys = min32(j.group.keys - first, j.part_keys());
  const int turns = F::kSequential ? ceil_div32(keys, F::kTile) : 1;
  for (int turn = 0; turn < turns; ++turn) {
    j.tile = first / F::kTile + turn + rank;
    __syncthreads();
    attend(j, s, stage_state, next_part < 0 ? -1 : next_part * F::kCluster + rank, overlapped_work);
    ptx::cluster_sync();
    combine_tiles(j, s, rank, thread, turn, alone && turn + 1 == turns, [&](int i) { return ptx::in_block(&s, i); });
    if (!F::kSequential) continue;
    __syncthreads();
    store_running_sums(j, s, thread, turn);
  }
}

// Grid: (blocks of clusters that share the groups, heads, clusters that share the parts of a row, so that clusters
// without a part come last). All blocks of a cluster execute the same loops, so that they reach the same barriers.
//
// It starts early, but does not let dependents start before its end: with few heads it leaves many SMs idle, on which
// the blocks of the next projection would be placed in pairs, and stay so for their whole stream of weights. Instead,
// the projection before it has prefetched the first of these weights (Weights::next).
template <int kDim, class Stored>
__global__ void __launch_bounds__(DeviceShape<kDim, Stored>::kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionSetup a, const Stored* keys, const Stored* values,
                     uint16_t* out) {
  using F = DeviceShape<kDim, Stored>;
  ptx::wait_for_dependencies();
  auto& s = *reinterpret_cast<SharedMemory<F>*>(dynamic_shared());
  const int rank = static_cast<int>(ptx::cluster_rank()), thread = static_cast<int>(threadIdx.x);
  const int clusters = static_cast<int>(gridDim.x) / F::kCluster, step = static_cast<int>(gridDim.z);
  const int entries = group_table_size(a);
  StageState stage_state;
  for (int entry = static_cast<int>(blockIdx.x) / F::kCluster; entry < entries; entry += clusters) {
    TileTask<F> j{a, keys, values, out, static_cast<int>(blockIdx.y), a.groups[entry], entry,
                  static_cast<int>(blockIdx.z), 0};
    const int count = ceil_div32(j.group.keys, j.part_keys());
    if (j.group.count == 0 || j.part >= count) continue;
    load_key_counts(j, s, thread);
    bool there = false;  // whether the queries have been loaded
    const auto overlapped_work = [&](int mine) {
      if (there) return;
      load_queries(j, s, mine);
      there = true;
    };
    for (; j.part < count; j.part += step) {
      const int next_part = j.part + step < count ? j.part + step : -1;
      attend_part(j, s, rank, thread, count == 1, next_part, stage_state, overlapped_work);
      if (count > 1 && is_last(j, s, rank, thread, count)) combine_parts(j, rank, thread, count);
      // no block reads another block's memory any more; after the last part no written data has to be made visible
      const bool more = j.part + step < count || entry + clusters < entries;
      more ? ptx::cluster_sync() : ptx::cluster_meet();
    }
  }
}

// Grid: (blocks of a row, rows).
template <int kDim, class Stored>
__global__ void __launch_bounds__(kRopeThreads)
    rope_append_kernel(const __grid_constant__ AttentionSetup a, const uint16_t* qkv, Stored* keys, Stored* values) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int i = static_cast<int>(blockIdx.x * kRopeThreads + threadIdx.x);
  if (i < row_pieces(a)) rope_append<kDim>(a, qkv, keys, values, static_cast<int>(blockIdx.y), i);
}

// Distributes the clusters that run concurrently: first over the heads and groups, then over the parts of a row.
template <class F>
void launch_attention(const AttentionSetup& a, const void* qkv, void* keys, void* values, void* out, Stream stream) {
  const int64_t groups = min64(max64(a.clusters / a.kv_heads, 1), group_table_size(a));
  const int64_t shared =
      clusters_per_row(a.clusters, a.kv_heads * groups, ceil_div(a.capacity, part_keys<F>(a.capacity)));
  const dim3 grid(static_cast<unsigned>(groups * F::kCluster), static_cast<unsigned>(a.kv_heads),
                  static_cast<unsigned>(shared));
  const Launch how{.grid = grid, .threads = F::kThreads, .cluster = F::kCluster, .shared = sizeof(SharedMemory<F>),
                   .early = true};
  using Stored = typename F::Stored;
  const dim3 pieces(static_cast<unsigned>(ceil_div32(row_pieces(a), kRopeThreads)), static_cast<unsigned>(a.rows));
  launch("attention", rope_append_kernel<F::kDim, Stored>, {.grid = pieces, .threads = kRopeThreads, .early = true},
         stream, a, static_cast<const uint16_t*>(qkv), static_cast<Stored*>(keys), static_cast<Stored*>(values));
  launch("attention", attention_kernel<F::kDim, Stored>, how, stream, a, static_cast<const Stored*>(keys),
         static_cast<const Stored*>(values), static_cast<uint16_t*>(out));
}

// Calls `work` with the kernel shape of the current device, the DeviceShape of its architecture.
template <class Stored, class Do>
auto with_shape(int64_t dim, Do work) {
  if (device_info().has_clusters())
    return dim == 64 ? work(ClusterShape<64, Stored>{}) : work(ClusterShape<128, Stored>{});
  return dim == 64 ? work(BlockShape<64, Stored>{}) : work(BlockShape<128, Stored>{});
}
template <class Do>
auto with_shape(int64_t dim, bool float8, Do work) {
  return float8 ? with_shape<uint8_t>(dim, work) : with_shape<uint16_t>(dim, work);
}

}  // namespace

int64_t attention_group_rows(int64_t heads, int64_t kv_heads) { return kColumns / (heads / kv_heads); }

int64_t attention_groups(int64_t rows, int64_t heads, int64_t kv_heads, bool one_sequence) {
  return one_sequence ? ceil_div(rows, attention_group_rows(heads, kv_heads)) : rows;
}

int64_t attention_lines(int64_t rows, int64_t heads, int64_t capacity) {
  return with_shape(
      64, false, [&](auto shape) { return rows * heads * ceil_div(capacity, part_keys<decltype(shape)>(capacity)); });
}

int64_t attention_clusters(int64_t dim, bool float8) {
  with_shape(dim, float8, [](auto shape) {
    using F = decltype(shape);
    allow_shared_memory("attention", attention_kernel<F::kDim, typename F::Stored>, sizeof(SharedMemory<F>));
  });
  const Device& device = device_info();
  return device.max_clusters[device.has_clusters() ? 3 : 0];
}

void prepare_attention(const AttentionSetup& a, Stream stream) {
  if (a.rows == 0) return;
  const Launch how{.grid = dim3(static_cast<unsigned>(group_table_size(a))), .threads = kListThreads, .early = true};
  launch("prepare_attention", list_keys_kernel, how, stream, a);
}

void attention(const AttentionSetup& a, const void* qkv, void* keys, void* values, void* out, Stream stream) {
  if (a.rows == 0) return;
  with_shape(a.dim, a.float8,
             [&](auto shape) { launch_attention<decltype(shape)>(a, qkv, keys, values, out, stream); });
}

}  // namespace swiftspec::cuda
