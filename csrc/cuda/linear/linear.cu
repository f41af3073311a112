// Projections of up to 32 rows, optionally with an all-reduce over the ranks of a group: one kernel body for a launch
// without other ranks, for a rank of a group, and for several virtual ranks in tests.
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

// The launch has no other ranks. Its kernel has no code for an exchange.
struct NoRanks {
  static constexpr bool kReduces = false;
  static constexpr int kBlocksPerSm = 2;  // CTAs with up to 16 rows
  LinearTask task;
  __device__ const LinearTask& my_task() const { return task; }
  __device__ int block() const { return static_cast<int>(blockIdx.x); }
};

// A QKV projection, of up to 8 rows and with an RMSNorm, that appends to the cache.
struct AppendingQkv : NoRanks {
  RopeAppend append;
};

// The launch belongs to one rank of a group.
struct SingleRank {
  static constexpr bool kReduces = true;
  static constexpr int kBlocksPerSm = 2;
  LinearTask task;
  Channel channel;
  __device__ const LinearTask& my_task() const { return task; }
  __device__ const Channel& my_channel() const { return channel; }
  __device__ int block() const { return static_cast<int>(blockIdx.x); }
  __device__ int blocks() const { return static_cast<int>(gridDim.x); }
  __device__ void pause(int) const {}
};

// Several virtual ranks, which share the CTAs of one cooperative launch evenly. Random pauses vary their relative
// speed.
struct VirtualRanks {
  static constexpr bool kReduces = true;
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
template <bool kNormed>
__device__ bool normalises_in_place(const LinearTask& task, const ThreadIndex& at) {
  return ptx::kBulk && kNormed && task.tiling.range(at.cta) <= task.smem.chunk_tiles;
}

// Computes the sums of a warp's strip over all inputs of this CTA. `staged`: an earlier call has already staged x.
template <bool kInt4, int kRows8, bool kNormed, bool kWhole>
__device__ void multiply(const LinearTask& task, const ThreadIndex& at, bool staged, uint8_t* shared,
                         Ring<tiles::TileIterator>& ring, Sums<kRows8>& sums) {
  const int first = task.tiling.first_tile(at.cta), range = task.tiling.range(at.cta), chunk = task.smem.chunk_tiles;
  clear<kRows8>(sums);
  for (int begin = 0; begin < range; begin += chunk) {
    const int here = min(chunk, range - begin);
    if (!staged || range > chunk) {
      __syncthreads();  // all warps have finished the previous chunk
      const int64_t input = static_cast<int64_t>(first + begin) * task.tiling.tile_k;
      stage_activations<kInt4, kRows8, kNormed>(task, at, input, here * task.tiling.tile_k / tiles::kBlock,
                                                normalises_in_place<kNormed>(task, at), shared);
      if (!staged && begin == 0) SWIFTSPEC_STAMP(task, kStagedByWarp);
      __syncthreads();
      if (!staged && begin == 0) SWIFTSPEC_STAMP(task, kStaged);
    }
    multiply_chunk<kInt4, kRows8, kWhole>(task, at, here, shared, ring, sums);
  }
}

// Sends the lane's lines of a unit.
template <class Ranks>
__device__ void send_unit(const Ranks& ranks, const LinearTask& task, const ThreadIndex& at, const Unit& unit,
                          const Session<DeviceMemory>& session) {
  ranks.pause(2 * unit.strip);
  if (!tiles::has_line(task.tiling, unit.strip, unit.j, at.lane, task.rows)) return;
  for (int second = 0; second < 2; ++second) {
    const int64_t line = tiles::ll_line(task.tiling, unit.strip, unit.j, at.lane, second);
    session.send(session.owners(unit.strip), line, line_of(unit, second));
  }
}

// Receives and sums the lines of all ranks for this warp's units, and writes the outputs. Of a two-shot sum, the units
// that this rank owns come first.
template <int kRows8, class Ranks>
__device__ void receive(const Ranks& ranks, const LinearTask& task, const ThreadIndex& at,
                        const Session<DeviceMemory>& session) {
  PollLoop wait(session.channel, session.epoch);
  const int passes = session.two_shot() ? 2 : 1;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    for (int turn = at.cluster; turn < task.tiling.turns(); turn += task.clusters) {
      for_each_unit<kRows8>(task, at, kWarps, turn << task.tiling.n_log, [&](Unit& unit) {
        if (session.owns(unit.strip) != (pass == 0)) return;
        ranks.pause(2 * unit.strip + 1);
        if (!tiles::has_line(task.tiling, unit.strip, unit.j, at.lane, task.rows)) return;
        uint64_t totals[2] = {};
#pragma unroll 1
        for (int second = 0; second < 2; ++second) {  // unrolled, the exchange spills on some architectures
          const int64_t line = tiles::ll_line(task.tiling, unit.strip, unit.j, at.lane, second);
          uint64_t total = 0;
          if (!session.reduce(unit.strip, line, total, wait)) return;
          totals[0] = second == 0 ? total : totals[0];
          totals[1] = total;
        }
        set_line(unit, 0, totals[0]);
        set_line(unit, 1, totals[1]);
        store_unit(task.tiling, task.to, at.lane, unit);
      });
    }
  }
}

// The exchange of this launch; nothing if it has no other ranks.
template <class Ranks>
__device__ auto session_of(const Ranks& ranks) {
  if constexpr (Ranks::kReduces) {
    return Session<DeviceMemory>{ranks.my_channel(), ptx::load_system(ranks.my_channel().epoch)};
  } else {
    return 0;
  }
}

// Kernel body, executed by every CTA of every rank.
template <bool kInt4, int kRows8, bool kNormed, bool kWhole, class Ranks>
__device__ void linear_body(const Ranks& ranks) {
  uint8_t* shared = dynamic_shared();
  const LinearTask& task = ranks.my_task();
  const ThreadIndex at{ranks.block() >> task.tiling.cluster_log, static_cast<int>(ptx::cluster_rank()),
                 static_cast<int>(threadIdx.x) / 32, static_cast<int>(threadIdx.x) % 32};
  SWIFTSPEC_STAMP(task, kStart);
  if constexpr (kNormed) fetch_norm(task, at, shared);  // ahead of the ring, whose copies are many
  Ring ring(task, at, shared, tiles::tiles_of_warp(task.tiling, at.cluster, task.clusters, at.cta, at.warp));
  SWIFTSPEC_STAMP(task, kRing);
  ptx::launch_dependents();
#ifdef SWIFTSPEC_STAMPS
  stamps::touch_pages(task.touched, task.touched_bytes);
#endif
  constexpr bool kAppends = std::is_same_v<Ranks, AppendingQkv>;
  [[maybe_unused]] AppendedRows rows;
  if constexpr (kAppends) {
    if (!ranks.append.setup.prepared) ptx::wait_for_dependencies();
    rows = appended_rows(ranks.append.setup, at.lane);
  }
  ptx::wait_for_dependencies();
  SWIFTSPEC_STAMP(task, kDependencies);
  [[maybe_unused]] const auto session = session_of(ranks);
  if constexpr (kNormed) {
    auto* x = reinterpret_cast<uint4*>(shared + task.smem.x);
    norm_scales<kRows8>(task, at, 0, normalises_in_place<kNormed>(task, at) ? x : nullptr, shared);
    await_norm(task, at, shared);
  }
  SWIFTSPEC_STAMP(task, kNormScales);
  int count = 0;
  for (int turn = at.cluster; turn < task.tiling.turns(); turn += task.clusters, ++count) {
    Sums<kRows8> sums;
    multiply<kInt4, kRows8, kNormed, kWhole>(task, at, count > 0, shared, ring, sums);
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
      if constexpr (kAppends) {
        append_unit(task.tiling, ranks.append, rows, rope, at.lane, unit);
      } else if constexpr (Ranks::kReduces) {
        send_unit(ranks, task, at, unit, session);
      } else {
        store_unit(task.tiling, task.to, at.lane, unit);
      }
    });
    SWIFTSPEC_STAMP(task, kStored);
  }
  if constexpr (Ranks::kReduces) {
    receive<kRows8>(ranks, task, at, session);
    end_epoch(session, tiles::ll_lines(task.tiling, task.rows), ranks.block(), ranks.blocks());
  }
  ptx::cluster_meet();  // no CTA exits while another one reads its shared memory
  SWIFTSPEC_STAMP(task, kExit);
}

// A kernel for each kind of projection, so that code which it does not run takes no place in the instruction cache.
template <bool kInt4, int kRows8, bool kNormed, bool kWhole, class Ranks>
__global__ void __launch_bounds__(kThreads, kRows8 <= tiles::kPairedRows8 ? Ranks::kBlocksPerSm : 1)
    linear_kernel(const __grid_constant__ Ranks ranks) {
  linear_body<kInt4, kRows8, kNormed, kWhole>(ranks);
}

template <class Ranks>
using Kernel = void (*)(Ranks);

template <class Ranks, bool kInt4, bool kNormed, bool kWhole>
Kernel<Ranks> kernel_of(int rows8) {
  if (rows8 == 1) return linear_kernel<kInt4, 1, kNormed, kWhole, Ranks>;
  return rows8 == 2 ? linear_kernel<kInt4, 2, kNormed, kWhole, Ranks> : linear_kernel<kInt4, 4, kNormed, kWhole, Ranks>;
}

template <class Ranks, bool kNormed = false>
Kernel<Ranks> kernel_of(const tiles::Tiling& t, int rows8) {
  if (t.group == 0) return kernel_of<Ranks, false, kNormed, true>(rows8);
  return t.group_log == 2 ? kernel_of<Ranks, true, kNormed, true>(rows8) : kernel_of<Ranks, true, kNormed, false>(rows8);
}

// That of a projection without other ranks.
Kernel<NoRanks> kernel_for(const tiles::Tiling& t, int rows8, bool normed) {
  return normed ? kernel_of<NoRanks, true>(t, rows8) : kernel_of<NoRanks>(t, rows8);
}

Kernel<AppendingQkv> qkv_kernel_for(const tiles::Tiling& t) {
  if (t.group == 0) return linear_kernel<false, 1, true, true, AppendingQkv>;
  return t.group_log == 2 ? linear_kernel<true, 1, true, true, AppendingQkv>
                          : linear_kernel<true, 1, true, false, AppendingQkv>;
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
  for (const int group : {0, 32, 128}) {
    const tiles::Tiling t = tiles::shape(group, 1, group);
    for (const int rows8 : {1, 2, 4}) {
      for (const bool normed : {false, true}) allow_shared_memory("linear", kernel_for(t, rows8, normed), device.shared);
      allow_shared_memory("linear", kernel_of<SingleRank>(t, rows8), device.shared);
      allow_shared_memory("linear", kernel_of<VirtualRanks>(t, rows8), device.shared);
    }
    allow_shared_memory("linear", qkv_kernel_for(t), device.shared);
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
  LinearTask task = task_of(args, rows8, tiles::concurrent_clusters(weights.tiling, rows8, weights.device));
  Launch how = launch_of(task, task.clusters);
  how.early = true;
#ifdef SWIFTSPEC_STAMPS
  task.stamps = stamp_records(weights, int64_t{how.grid.x} * kWarps);
#endif
  if (args.append != nullptr) {
    return launch("linear", qkv_kernel_for(weights.tiling), how, stream, AppendingQkv{{task}, *args.append});
  }
  if (args.channel != nullptr) {
    const auto kernel = kernel_of<SingleRank>(weights.tiling, rows8);
    return launch("linear", kernel, how, stream, SingleRank{task, *args.channel});
  }
  launch("linear", kernel_for(weights.tiling, rows8, args.norm != nullptr), how, stream, NoRanks{task});
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
  launch("linear", kernel_of<VirtualRanks>(weights.tiling, rows8), how, stream, many);
}

}  // namespace swiftspec::cuda
