// Projections of up to 32 rows, optionally with an all-reduce over the ranks of a group: one kernel body for one rank
// per launch, and for several virtual ranks in tests.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/linear/epilogue.cuh"
#include "cuda/linear/rope_epilogue.h"
#include "cuda/peers/ll.cuh"
#include "cuda/shared.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

using tiles::kThreads;
using tiles::kWarps;

// The launch belongs to one rank.
struct SingleRank {
  static constexpr int kBlocksPerSm = 2;  // CTAs with up to 16 rows
  LinearTask task;
  Channel channel;  // without ranks the sums stay local
  __device__ const LinearTask& my_task() const { return task; }
  __device__ const Channel& my_channel() const { return channel; }
  __device__ int block() const { return static_cast<int>(blockIdx.x); }
  __device__ int blocks() const { return static_cast<int>(gridDim.x); }
  __device__ void pause(int) const {}
};

// A QKV projection that appends to the cache.
struct AppendingRank : SingleRank {
  RopeAppend append;
};

// Several virtual ranks, which share the CTAs of one cooperative launch evenly. Random pauses vary their relative
// speed.
struct VirtualRanks {
  static constexpr int kBlocksPerSm = 1;
  LinearTask tasks[kMaxPeers];
  Channel channels[kMaxPeers];
  int32_t per_rank;  // CTAs
  uint32_t delays;

  __device__ int rank() const { return static_cast<int>(blockIdx.x) / per_rank; }
  __device__ const LinearTask& my_task() const { return tasks[rank()]; }
  __device__ const Channel& my_channel() const { return channels[rank()]; }
  __device__ int block() const { return static_cast<int>(blockIdx.x) % per_rank; }
  __device__ int blocks() const { return per_rank; }
  __device__ void pause(int step) const {
    if (delays == 0) return;
    uint32_t dice = (delays ^ (blockIdx.x * 0x9e3779b9u + step)) * 0x7feb352du;
    dice = (dice ^ dice >> 15) * 0x846ca68bu;
    if (dice >> 28 == 0) __nanosleep(dice >> 8 & 0xffff);  // one time in sixteen, up to 65 us
  }
};

// Whether norm_scales stores x in shared memory, where stage_activations then normalises it. On Ampere the second read
// comes from L1, and the registers are too few.
__device__ inline bool normalises_in_place(const LinearTask& task, const ThreadIndex& at) {
  return ptx::kBulk && task.norm != nullptr && task.tiling.range(at.cta) <= task.smem.chunk_tiles;
}

// Computes the sums of a warp's strip over all inputs of this CTA. `staged`: an earlier call has already staged x.
template <bool kInt4, int kRows8>
__device__ void multiply(const LinearTask& task, const ThreadIndex& at, bool staged, uint8_t* shared,
                         Ring<tiles::TileIterator>& ring, Sums<kRows8>& sums) {
  const int first = task.tiling.first_tile(at.cta), range = task.tiling.range(at.cta), chunk = task.smem.chunk_tiles;
  clear<kRows8>(sums);
  for (int begin = 0; begin < range; begin += chunk) {
    const int here = min(chunk, range - begin);
    if (!staged || range > chunk) {
      __syncthreads();  // all warps have finished the previous chunk
      const int64_t input = static_cast<int64_t>(first + begin) * task.tiling.tile_k;
      stage_activations<kInt4, kRows8>(task, at, input, here * task.tiling.tile_k / tiles::kBlock,
                                         normalises_in_place(task, at), shared);
      if (!staged && begin == 0) SWIFTSPEC_STAMP(task, kStagedByWarp);
      __syncthreads();
      if (!staged && begin == 0) SWIFTSPEC_STAMP(task, kStaged);
    }
    multiply_chunk<kInt4, kRows8>(task, at, here, shared, ring, sums);
  }
}

// Receives and sums the lines of all ranks for this warp's units, and writes the outputs.
template <int kRows8, class Ranks>
__device__ void receive(const Ranks& ranks, const LinearTask& task, const ThreadIndex& at,
                        const Session<DeviceMemory>& session) {
  PollLoop wait(session.channel, session.epoch);
  for (int turn = at.cluster; turn < task.tiling.turns(); turn += task.clusters) {
    for_each_unit<kRows8>(task, at, kWarps, turn << task.tiling.n_log, [&](Unit& unit) {
      ranks.pause(2 * unit.strip + 1);
      if (!tiles::has_line(task.tiling, unit.strip, unit.j, at.lane, task.rows)) return;
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        uint64_t total = 0;
        if (!session.reduce(tiles::ll_line(task.tiling, unit.strip, unit.j, at.lane, second), total, wait)) return;
        set_line(unit, second, total);
      }
      store_unit(task.tiling, task.to, at.lane, unit);
    });
  }
}

// Kernel body, executed by every CTA of every rank.
template <bool kInt4, int kRows8, class Ranks>
__device__ void linear_body(const Ranks& ranks) {
  uint8_t* shared = dynamic_shared();
  const LinearTask& task = ranks.my_task();
  const Channel& channel = ranks.my_channel();
  const ThreadIndex at{ranks.block() >> task.tiling.cluster_log, static_cast<int>(ptx::cluster_rank()),
                 static_cast<int>(threadIdx.x) / 32, static_cast<int>(threadIdx.x) % 32};
  SWIFTSPEC_STAMP(task, kStart);
  fetch_norm(task, at, shared);  // ahead of the ring, whose copies are many
  Ring ring(task, at, shared, tiles::tiles_of_warp(task.tiling, at.cluster, task.clusters, at.cta, at.warp));
  SWIFTSPEC_STAMP(task, kRing);
  ptx::launch_dependents();
#ifdef SWIFTSPEC_STAMPS
  stamps::touch_pages(task.touched, task.touched_bytes);
#endif
  constexpr bool kAppends = std::is_same_v<Ranks, AppendingRank>;
  [[maybe_unused]] AppendedRows rows;
  if constexpr (kAppends) {
    if (!ranks.append.setup.prepared) ptx::wait_for_dependencies();
    rows = appended_rows(ranks.append.setup, at.lane);
  }
  ptx::wait_for_dependencies();
  SWIFTSPEC_STAMP(task, kDependencies);
  const bool reduces = channel.layout.ranks > 0;
  const Session<DeviceMemory> session{channel, reduces ? ptx::load_system(channel.epoch) : 0};
  if (task.norm != nullptr) {
    auto* x = reinterpret_cast<uint4*>(shared + task.smem.x);
    norm_scales<kRows8>(task, at, 0, normalises_in_place(task, at) ? x : nullptr, shared);
    await_norm(task, at, shared);
  }
  SWIFTSPEC_STAMP(task, kNormScales);
  int count = 0;
  for (int turn = at.cluster; turn < task.tiling.turns(); turn += task.clusters, ++count) {
    Sums<kRows8> sums;
    multiply<kInt4, kRows8>(task, at, count > 0, shared, ring, sums);
    SWIFTSPEC_STAMP(task, kLastTile);
    if (turn + task.clusters >= task.tiling.turns()) {  // its own weights have been read
      prefetch_tiles(task, ranks.block() * kWarps + at.warp, at.lane);
    }
    const int strip = turn << task.tiling.n_log;
    [[maybe_unused]] RopePairs rope;
    if constexpr (kAppends) {  // for the warp's only unit
      const int mine = (at.warp << task.tiling.cluster_log) + at.cta;
      if (mine < task.tiling.warps_n()) rope = load_rope(task.tiling, ranks.append.setup, rows, strip + mine, at.lane);
    }
    const float4* joined = reduce_warps<kRows8>(task, at, count, sums, shared);
    SWIFTSPEC_STAMP(task, kWarpSum);
    sync_cluster(task);
    SWIFTSPEC_STAMP(task, kClusterBarrier);
    for_each_unit<kRows8>(task, at, kWarps, strip, [&](Unit& unit) {
      read_unit<kRows8>(task, at, strip, joined, unit);
      add_bias(task.tiling, task.to, at.lane, unit);
      if constexpr (kAppends) return append_unit(task.tiling, ranks.append, rows, rope, at.lane, unit);
      if (!reduces) return store_unit(task.tiling, task.to, at.lane, unit);
      ranks.pause(2 * unit.strip);
      if (!tiles::has_line(task.tiling, unit.strip, unit.j, at.lane, task.rows)) return;
      for (int second = 0; second < 2; ++second) {
        session.broadcast(tiles::ll_line(task.tiling, unit.strip, unit.j, at.lane, second), line_of(unit, second));
      }
    });
    SWIFTSPEC_STAMP(task, kStored);
  }
  if (reduces) {
    receive<kRows8>(ranks, task, at, session);
    end_epoch(session, tiles::ll_lines(task.tiling, task.rows), ranks.block(), ranks.blocks());
  }
  ptx::cluster_meet();  // no CTA exits while another one reads its shared memory
  SWIFTSPEC_STAMP(task, kExit);
}

template <bool kInt4, int kRows8, class Ranks>
__global__ void __launch_bounds__(kThreads, kRows8 <= tiles::kPairedRows8 ? Ranks::kBlocksPerSm : 1)
    linear_kernel(const __grid_constant__ Ranks ranks) {
  linear_body<kInt4, kRows8>(ranks);
}

template <class Ranks>
using Kernel = void (*)(Ranks);

template <class Ranks>
Kernel<Ranks> kernel_for(bool int4, int rows8) {
  if (int4) {
    if (rows8 == 1) return linear_kernel<true, 1, Ranks>;
    return rows8 == 2 ? linear_kernel<true, 2, Ranks> : linear_kernel<true, 4, Ranks>;
  }
  if (rows8 == 1) return linear_kernel<false, 1, Ranks>;
  return rows8 == 2 ? linear_kernel<false, 2, Ranks> : linear_kernel<false, 4, Ranks>;
}

Kernel<AppendingRank> qkv_kernel_for(bool int4) {
  return int4 ? linear_kernel<true, 1, AppendingRank> : linear_kernel<false, 1, AppendingRank>;
}

int rows8_of(int64_t rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : 4; }

LinearTask task_of(const LinearArgs& a, int rows8, int clusters) {
  const tiles::Tiling& t = a.weights->tiling;
  clusters = std::clamp(t.turns(), 1, clusters);
  return task_of(a, tiles::smem_layout(t, rows8, a.weights->device, a.norm != nullptr), clusters,
                 static_cast<int64_t>(clusters) * t.cluster() * kWarps);
}

Launch launch_of(const LinearTask& task, int clusters) {
  const int cluster = task.tiling.cluster();
  return {.grid = dim3(static_cast<unsigned>(clusters * cluster)),
          .threads = kThreads,
          .cluster = cluster,
          .shared = task.smem.total};
}

}  // namespace

void prepare_linear(const Device& device) {
  prepare_direct(device);
  prepare_stream(device);
  prepare_large_m(device);
  prepare_prefill(device);
  for (const bool int4 : {false, true}) {
    for (const int rows8 : {1, 2, 4}) {
      allow_shared_memory("linear", kernel_for<SingleRank>(int4, rows8), device.shared);
      allow_shared_memory("linear", kernel_for<VirtualRanks>(int4, rows8), device.shared);
    }
    allow_shared_memory("linear", qkv_kernel_for(int4), device.shared);
  }
}

LinearArgs slice_rows(LinearArgs args, int64_t first, int64_t rows) {
  const int64_t k = args.weights->tiling.k, n = args.weights->tiling.n;
  const auto skip = [first](const void* from, int64_t row) {
    return from == nullptr ? nullptr : static_cast<const uint16_t*>(from) + first * row;
  };
  args.x = skip(args.x, k);
  args.residual = skip(args.residual, n);
  if (args.out != nullptr) args.out = static_cast<uint16_t*>(args.out) + first * (args.swiglu ? n / 2 : n);
  if (args.logits != nullptr) args.logits += first * n;
  args.rows = rows;
  return args;
}

bool has_variant(const LinearArgs& a) {
  if (a.weights->tiling.variant == tiles::kRing || a.rows > tiles::kVariantRows || a.channel != nullptr) return false;
  return a.norm != nullptr ? a.residual == nullptr : !a.swiglu && a.logits == nullptr;  // as models call it
}

bool can_append(const Weights& weights, int64_t rows, int64_t dim) {
  return rows <= tiles::kVariantRows && weights.tiling.heads != 0 && 2 * weights.tiling.apart == dim;
}

void linear(const LinearArgs& args, Stream stream) {
  if (args.rows == 0) return;
  const Weights& weights = *args.weights;
  if (has_variant(args)) {
    return weights.tiling.variant == tiles::kDirect ? linear_direct(args, stream) : linear_stream(args, stream);
  }
  const int rows8 = rows8_of(args.rows);
  SingleRank ranks{task_of(args, rows8, tiles::concurrent_clusters(weights.tiling, rows8, weights.device)), {}};
  if (args.channel != nullptr) ranks.channel = *args.channel;
  Launch how = launch_of(ranks.task, ranks.task.clusters);
  how.early = true;
#ifdef SWIFTSPEC_STAMPS
  ranks.task.stamps = stamp_records(weights, int64_t{how.grid.x} * kWarps);
#endif
  const bool int4 = weights.tiling.group != 0;
  if (args.append != nullptr) {
    return launch("linear", qkv_kernel_for(int4), how, stream, AppendingRank{ranks, *args.append});
  }
  launch("linear", kernel_for<SingleRank>(int4, rows8), how, stream, ranks);
}

void linear_virtual(const LinearArgs* ranks, int count, uint32_t delays, Stream stream) {
  const Weights& weights = *ranks[0].weights;
  // one block per multiprocessor
  const int rows8 = rows8_of(ranks[0].rows), share = weights.device.max_clusters[weights.tiling.cluster_log] / count;
  if (share < 1) throw std::runtime_error("more virtual ranks than clusters fit on this device");
  VirtualRanks many{};
  for (int r = 0; r < count; ++r) {
    many.tasks[r] = task_of(ranks[r], rows8, share);
    many.channels[r] = *ranks[r].channel;
  }
  const int clusters = many.tasks[0].clusters;
  many.per_rank = clusters * weights.tiling.cluster();
  many.delays = delays;
  Launch how = launch_of(many.tasks[0], clusters * count);
  how.cooperative = true;
  launch("linear", kernel_for<VirtualRanks>(weights.tiling.group != 0, rows8), how, stream, many);
}

}  // namespace swiftspec::cuda
