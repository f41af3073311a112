#include "cuda/attention/attention.h"

#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/shared.cuh"
#include "cuda/stamps.cuh"

namespace swiftspec::cuda {
namespace {

using namespace attention;

constexpr int kListThreads = 256, kRopeThreads = 128;

// Reduction over the rows of a group: minimum of the shared leading slots, maximum of the keys; and over the rows of its
// sequence: minimum of the slots that the forward writes.
struct GroupExtent {
  int base, keys, appended;
};

// A block lists the keys of the rows of one group.
__global__ void __launch_bounds__(kListThreads) list_keys_kernel(const __grid_constant__ AttentionSetup a) {
  auto& [base, keys, appended] = shared_variable<GroupExtent>();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int thread = static_cast<int>(threadIdx.x);
  RowGroup group = group_rows_at(a, static_cast<int>(blockIdx.x));
  if (thread == 0) {
    base = INT32_MAX;
    keys = 0;
    appended = INT32_MAX;
  }
  __syncthreads();
  const int64_t sequence = group.count > 0 ? sequence_of(a, group.first) : 0;
  for (int row = thread; group.count > 0 && row < static_cast<int>(a.rows); row += kListThreads) {
    atomicMin(&appended, appended_slot(a, row, sequence));
  }
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
    group.appended = appended;
    if (group.count > 0) group.window = window_start(a, sequence);
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

// Grid: (blocks of clusters that share the groups, heads, parts). All blocks of a cluster execute the same loop, so that
// they reach the same barriers. Clusters whose part has no keys come last.
//
// It starts early, but does not let dependents start before its end: with few heads it leaves many SMs idle, on which
// the blocks of the next projection would be placed in pairs, and stay so for their whole stream of weights. Instead,
// the projection before it has prefetched the first of these weights (Weights::next). So when it starts, an earlier
// attention kernel has ended, and all kernels before that one. If that one followed list_keys_kernel (`prepared`), it
// plans its first tile before it waits, and loads the units to which the forward does not append.
//
// All kernels between the two may still run, since each lets the next one start at its own start: O, the MLP, QKV, and
// rope_append_kernel unless QKV appends. What is read here before the wait is older than the earlier attention kernel, and
// none of them writes it: keys and values are written from RowGroup::appended on. The same holds for what QKV and
// rope_append_kernel read before they wait: positions, slots and tables, which only kernels before list_keys_kernel write.
// They write queries and the cache after their wait, when the readers of the layer before have ended.
template <AttentionShape kName, int kDim, class Stored>
__global__ void __launch_bounds__(DeviceShape<kName, kDim, Stored>::kThreads,
                                  DeviceShape<kName, kDim, Stored>::kBlocksPerSm)
    attention_kernel(const __grid_constant__ AttentionSetup a, const Stored* keys, const Stored* values,
                     uint16_t* out) {
  using F = DeviceShape<kName, kDim, Stored>;
  SWIFTSPEC_STAMP(a, kStart);
  if (!a.prepared) ptx::wait_for_dependencies();
  auto& s = *reinterpret_cast<SharedMemory<F>*>(dynamic_shared());
  const int rank = static_cast<int>(ptx::cluster_rank()), thread = static_cast<int>(threadIdx.x);
  const int clusters = static_cast<int>(gridDim.x) / F::kCluster, entries = group_table_size(a);
  StageState stage_state;
  for (int entry = static_cast<int>(blockIdx.x) / F::kCluster; entry < entries; entry += clusters) {
    TileTask<F> j{a, keys, values, out, static_cast<int>(blockIdx.y), load_group(a.groups + entry), entry,
                  static_cast<int>(blockIdx.z), 0};
    const int parts = j.parts();
    if (j.group.count == 0 || j.part >= parts) continue;
    load_key_counts(j, s, thread);
    SWIFTSPEC_STAMP(a, kCounts);
    attend(j, s, stage_state, rank,
           BlockSteps{[] { ptx::wait_for_dependencies(); }, [&](int mine) { load_queries(j, s, mine); }});
    ptx::wait_for_dependencies();  // a block without a tile has not waited yet
    ptx::cluster_sync();
    SWIFTSPEC_STAMP(a, kClusterBarrier);
    combine_blocks(j, rank, thread, parts == 1, [&](int i) { return ptx::in_block(&s, i); });
    if (parts > 1 && is_last(j, s, rank, thread, parts)) combine_parts(j, rank, thread, parts);
    SWIFTSPEC_STAMP(a, kStored);
    // no block reads another block's memory any more; at the end no written data has to be made visible
    entry + clusters < entries ? ptx::cluster_sync() : ptx::cluster_meet();
  }
  ptx::wait_for_dependencies();  // nor has one without a task
  SWIFTSPEC_STAMP(a, kExit);
}

// Grid: (blocks of a row, rows).
template <int kDim, class Stored>
__global__ void __launch_bounds__(kRopeThreads)
    rope_append_kernel(const __grid_constant__ AttentionSetup a, const uint16_t* qkv, Stored* keys, Stored* values) {
  ptx::launch_dependents();
  if (!a.prepared) ptx::wait_for_dependencies();
  const int i = static_cast<int>(blockIdx.x * kRopeThreads + threadIdx.x), row = static_cast<int>(blockIdx.y);
  const int piece = min32(i, row_pieces(a) - 1);  // no branch around the wait: the last threads repeat a piece
  attention::rope_append<kDim>(a, qkv, keys, values, row, piece, [] { ptx::wait_for_dependencies(); });
}

template <class F>
void launch_rope_append(const AttentionSetup& a, const void* qkv, void* keys, void* values, Stream stream) {
  using Stored = typename F::Stored;
  const dim3 pieces(static_cast<unsigned>(ceil_div32(row_pieces(a), kRopeThreads)), static_cast<unsigned>(a.rows));
  launch("attention", rope_append_kernel<F::kDim, Stored>, {.grid = pieces, .threads = kRopeThreads, .early = true},
         stream, a, static_cast<const uint16_t*>(qkv), static_cast<Stored*>(keys), static_cast<Stored*>(values));
}

// Groups that find no cluster share those of other groups.
template <class F>
void launch_attention(const AttentionSetup& a, const void* qkv, void* keys, void* values, void* out, Stream stream) {
  const int64_t groups = min64(max64(a.clusters / a.kv_heads, 1), group_table_size(a));
  const int parts = part_count<F>(static_cast<int>(a.capacity), a.most_parts);
  const dim3 grid(static_cast<unsigned>(groups * F::kCluster), static_cast<unsigned>(a.kv_heads),
                  static_cast<unsigned>(parts));
  const Launch how{.grid = grid, .threads = F::kThreads, .cluster = F::kCluster, .shared = sizeof(SharedMemory<F>),
                   .early = true};
  using Stored = typename F::Stored;
  if (qkv != nullptr) launch_rope_append<F>(a, qkv, keys, values, stream);
#ifdef SWIFTSPEC_STAMPS
  AttentionSetup stamped = a;
  stamped.stamps = stamps::Recorder::get().next("attention", int64_t{grid.x} * grid.y * grid.z * F::kWarps);
#else
  const AttentionSetup& stamped = a;
#endif
  launch("attention", attention_kernel<F::kName, F::kDim, Stored>, how, stream, stamped,
         static_cast<const Stored*>(keys), static_cast<const Stored*>(values), static_cast<uint16_t*>(out));
}

// Calls `work` with the kernel shape of this name for the current device, the DeviceShape of its architecture.
template <int kDim, class Stored, class Do>
auto with_shape(AttentionShape name, Do work) {
  if (!device_info().has_clusters()) return work(BlockShape<kDim, Stored>{});
  if (name == AttentionShape::kPaired) return work(PairedShape<kDim, Stored>{});
  return name == AttentionShape::kLong ? work(LongShape<kDim, Stored>{}) : work(ClusterShape<kDim, Stored>{});
}
template <class Stored, class Do>
auto with_shape(int64_t dim, AttentionShape name, Do work) {
  return dim == 64 ? with_shape<64, Stored>(name, work) : with_shape<128, Stored>(name, work);
}
template <class Do>
auto with_shape(int64_t dim, bool float8, AttentionShape name, Do work) {
  return float8 ? with_shape<uint8_t>(dim, name, work) : with_shape<uint16_t>(dim, name, work);
}

// Number of clusters of a shape that run concurrently.
template <class F>
int64_t concurrent_clusters(F) {
  constexpr int kLog = F::kCluster == 8 ? 3 : F::kCluster == 4 ? 2 : 0;
  static_assert(F::kCluster == 1 << kLog);
  const Device& device = device_info();
  return (F::kBlocksPerSm == 2 ? device.max_paired_clusters : device.max_clusters)[kLog];
}

}  // namespace

int64_t attention_group_rows(int64_t heads, int64_t kv_heads) { return kColumns / (heads / kv_heads); }

int64_t attention_groups(int64_t rows, int64_t heads, int64_t kv_heads, bool one_sequence) {
  return one_sequence ? ceil_div(rows, attention_group_rows(heads, kv_heads)) : rows;
}

AttentionShape attention_shape(int64_t capacity) {
  return capacity > kShortCapacity ? AttentionShape::kLong : AttentionShape::kShort;
}

int64_t attention_lines(int64_t rows, int64_t heads, int64_t kv_heads, int64_t capacity, AttentionShape shape) {
  const int most = attention_most_parts(kv_heads, shape);
  return with_shape<64, uint16_t>(shape, [&](auto kernel) {
    return rows * heads * part_count<decltype(kernel)>(static_cast<int>(capacity), most);
  });
}

int attention_most_parts(int64_t kv_heads, AttentionShape shape) {
  return with_shape<64, uint16_t>(
      shape, [&](auto kernel) { return most_parts(concurrent_clusters(kernel), kv_heads); });
}

int64_t attention_clusters(int64_t dim, bool float8, AttentionShape name) {
  return with_shape(dim, float8, name, [](auto shape) {
    using F = decltype(shape);
    using Stored = typename F::Stored;
    allow_shared_memory("attention", attention_kernel<F::kName, F::kDim, Stored>, sizeof(SharedMemory<F>));
    // the same carveout for the kernels before it
    allow_shared_memory("attention", rope_append_kernel<F::kDim, Stored>, 0);
    allow_shared_memory("attention", list_keys_kernel, 0);
    prepare_head_norm();
    return concurrent_clusters(shape);
  });
}

void prepare_attention(const AttentionSetup& a, Stream stream) {
  if (a.rows == 0) return;
  const Launch how{.grid = dim3(static_cast<unsigned>(group_table_size(a))), .threads = kListThreads, .early = true};
  launch("prepare_attention", list_keys_kernel, how, stream, a);
}

void attention(const AttentionSetup& a, const void* qkv, void* keys, void* values, void* out, Stream stream) {
  if (a.rows == 0) return;
  with_shape(a.dim, a.float8, a.shape,
             [&](auto shape) { launch_attention<decltype(shape)>(a, qkv, keys, values, out, stream); });
}

void rope_append(const AttentionSetup& a, const void* qkv, void* keys, void* values, Stream stream) {
  if (a.rows == 0) return;
  with_shape(a.dim, a.float8, a.shape,
             [&](auto shape) { launch_rope_append<decltype(shape)>(a, qkv, keys, values, stream); });
}

}  // namespace swiftspec::cuda
