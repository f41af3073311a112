// Projections of up to 8 rows by a stream of tiles without barriers of blocks or clusters; see stream.h.
#include "cuda/linear/stream.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/linear/epilogue.cuh"
#include "cuda/linear/rope_epilogue.h"
#include "cuda/shared.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

using tiles::kStreamSlots;
using tiles::kThreads;
using tiles::kWarps;
using tiles::StreamBarriers;

struct StreamTask {
  LinearTask each;
  int32_t barriers;  // offset of StreamBarriers
};

// Of a QKV projection that appends to the cache.
struct StreamQkvTask : StreamTask {
  RopeAppend append;
};

// What a warp needs to store the results of a strip: the lane's sums of both fragments, and what is loaded for them.
struct Results {
  float4 sums[2];
  ResidualPairs residual;
  RopePairs rope;
};

__device__ inline float4 sum_of(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The sums on their way from the warps to the results. Strips are counted within the cluster.
template <bool kNormed, class Task>
class Epilogue {
 public:
  __device__ Epilogue(const Task& stream, const ThreadIndex& at, uint8_t* shared)
      : stream_(stream),
        task_(stream.each),
        at_(at),
        ctas_(stream.each.tiling.cluster()),
        strips_((stream.each.tiling.strips - at.cluster + stream.each.clusters - 1) / stream.each.clusters),
        partial_(reinterpret_cast<float4*>(shared + stream.each.smem.partial)),
        joined_(reinterpret_cast<float4*>(shared + stream.each.smem.joined)),
        barriers_(reinterpret_cast<uint64_t*>(shared + stream.barriers)) {}

  // To be called once by all threads, when rows and tables of `append` may be read.
  __device__ void load_rows() {
    if constexpr (kAppends) rows_ = appended_rows(stream_.append.setup, at_.lane);
  }

  // To be called by all threads before the first strip; a barrier of the cluster must follow.
  __device__ void init() {
    if (threadIdx.x != 0) return;
    for (int slot = 0; slot < kStreamSlots; ++slot) {
      ptx::barrier_init(barriers_ + StreamBarriers::kStored + slot, kWarps);
      ptx::barrier_init(barriers_ + StreamBarriers::kAdded + slot, 1);
      ptx::barrier_init(barriers_ + StreamBarriers::kArrived + slot, 1);
      for (int owner = 0; owner < ctas_; ++owner) ptx::barrier_init(barriers_ + StreamBarriers::sent(owner, slot), 1);
    }
    ptx::fence_barrier_init();
  }

  __device__ int strips() const { return strips_; }

  // Stores this warp's sums of a strip.
  __device__ void store(int strip, const Sums<1>& sums) {
    const int slot = strip % kStreamSlots;
    if (strip >= kStreamSlots) wait(StreamBarriers::kAdded + slot, strip / kStreamSlots - 1);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      const float(&s)[4] = sums[f][0];
      partial_[place(slot, at_.warp, f)] = {s[0], s[1], s[2], s[3]};
    }
    __syncwarp();
    ptx::barrier_arrive(barriers_ + StreamBarriers::kStored + slot, at_.lane == 0);
  }

  // Advances the strips before `next`, whose sums this warp has stored: adds those of the last one, and stores the
  // results of the one before it. Each strip has one warp in each block that does so.
  __device__ void advance(int next) {
    const int last = next - 1, before = next - 2;
    int finished = -1;
    Results results;
    if (last >= 0 && last < strips_ && last % kWarps == at_.warp) {
      add_block(last, results);
      if (!ptx::kClusters || ctas_ == 1) {
        finished = last;
      } else {
        send(last, results.sums);
      }
    }
    if (ptx::kClusters && ctas_ > 1 && before >= 0 && before % kWarps == at_.warp && owner(before) == at_.cta) {
      add_cluster(before, results);
      finished = before;
    }
    if (finished >= 0) store_results(finished, results);
  }

 private:
  static constexpr bool kAppends = std::is_same_v<Task, StreamQkvTask>;

  __device__ int owner(int strip) const { return strip % ctas_; }
  __device__ int place(int slot, int part, int f) const { return ((slot * kWarps + part) * 2 + f) * 32 + at_.lane; }
  __device__ int joined_place(int slot, int cta, int f) const { return ((slot * ctas_ + cta) * 2 + f) * 32 + at_.lane; }
  __device__ void wait(int barrier, int use) { ptx::barrier_wait(barriers_ + barrier, use & 1); }

  __device__ Unit unit_of(int strip) const {
    Unit unit;
    unit.strip = at_.cluster + strip * task_.clusters, unit.j = 0;
    return unit;
  }

  __device__ void add_block(int strip, Results& results) {
    const int slot = strip % kStreamSlots;
    if (ctas_ == 1) load_operands(strip, results);
    wait(StreamBarriers::kStored + slot, strip / kStreamSlots);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      float4 total = partial_[place(slot, 0, f)];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) total = sum_of(total, partial_[place(slot, warp, f)]);
      results.sums[f] = ctas_ == 1 ? sum_of({0, 0, 0, 0}, total) : total;  // as reduce_cluster, for the sign of zero
    }
    __syncwarp();
    ptx::barrier_arrive(barriers_ + StreamBarriers::kAdded + slot, at_.lane == 0);
  }

  // Sends the sums of this block to the owner of the strip.
  __device__ void send(int strip, const float4 (&sums)[2]) {
    const int to = owner(strip), use = strip / ctas_, slot = use % kStreamSlots;
    if (use >= kStreamSlots) {
      ptx::cluster_barrier_wait(barriers_ + StreamBarriers::sent(to, slot), (use / kStreamSlots - 1) & 1);
    }
    uint64_t* arrived = barriers_ + StreamBarriers::kArrived + slot;
    if (to == at_.cta && at_.lane == 0) ptx::barrier_expect(arrived, static_cast<uint32_t>(ctas_) * 1024);
#pragma unroll
    for (int f = 0; f < 2; ++f) ptx::store_async(joined_ + joined_place(slot, at_.cta, f), to, sums[f], arrived);
  }

  // Adds the sums of the blocks, in order.
  __device__ void add_cluster(int strip, Results& results) {
    const int use = strip / ctas_, slot = use % kStreamSlots;
    load_operands(strip, results);
    ptx::cluster_barrier_wait(barriers_ + StreamBarriers::kArrived + slot, use / kStreamSlots & 1);
    results.sums[0] = results.sums[1] = {0, 0, 0, 0};
    for (int cta = 0; cta < ctas_; ++cta) {
#pragma unroll
      for (int f = 0; f < 2; ++f) results.sums[f] = sum_of(results.sums[f], joined_[joined_place(slot, cta, f)]);
    }
    __syncwarp();
    // only for strips that will wait for it: no arrival may be on its way when a block exits
    if (strip + kStreamSlots * ctas_ < strips_ && at_.lane < ctas_) {
      ptx::remote_arrive(barriers_ + StreamBarriers::sent(at_.cta, slot), static_cast<uint32_t>(at_.lane));
    }
  }

  __device__ void load_operands(int strip, Results& results) const {
    if constexpr (kAppends) {
      results.rope = load_rope(task_.tiling, stream_.append.setup, rows_, unit_of(strip).strip, at_.lane);
    }
    if (kNormed || task_.to.residual == nullptr) return;
    results.residual = load_residual(task_.tiling, task_.to, at_.lane, unit_of(strip));
  }

  __device__ void store_results(int strip, const Results& results) const {
    Outputs to = task_.to;
    Unit unit = unit_of(strip);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      const float4& v = results.sums[f];
      const float sums[4] = {v.x, v.y, v.z, v.w};
      set_sums(unit, f, sums);
    }
    add_bias(task_.tiling, to, at_.lane, unit);
    if (!kNormed && to.residual != nullptr) add_residual(results.residual, unit);
    to.residual = nullptr;
    if constexpr (!kNormed) to.swiglu = false, to.logits = nullptr;
    if constexpr (kAppends) {
      append_unit(task_.tiling, stream_.append, rows_, results.rope, at_.lane, unit);
    } else {
      store_unit(task_.tiling, to, at_.lane, unit);
    }
  }

  const Task& stream_;
  const LinearTask& task_;
  const ThreadIndex at_;
  AppendedRows rows_;
  int ctas_, strips_;
  float4 *partial_, *joined_;
  uint64_t* barriers_;
};

// kWhole: quantisation groups are whole tiles.
template <bool kNormed, bool kWhole, class Task>
__global__ void __launch_bounds__(kThreads, 2) stream_kernel(const __grid_constant__ Task stream) {
  uint8_t* shared = dynamic_shared();
  const LinearTask& task = stream.each;
  const tiles::Tiling& t = task.tiling;
  const ThreadIndex at{static_cast<int>(blockIdx.x) >> t.cluster_log, static_cast<int>(ptx::cluster_rank()),
                       static_cast<int>(threadIdx.x) / 32, static_cast<int>(threadIdx.x) % 32};
  SWIFTSPEC_STAMP(task, kStart);
  if constexpr (kNormed) fetch_norm(task, at, shared);
  Ring ring(task, at, shared, tiles::tiles_of_warp(t, at.cluster, task.clusters, at.cta, at.warp));
  Epilogue<kNormed, Task> epilogue(stream, at, shared);
  epilogue.init();
  SWIFTSPEC_STAMP(task, kRing);
  ptx::launch_dependents();
#ifdef SWIFTSPEC_STAMPS
  stamps::touch_pages(task.touched, task.touched_bytes);
#endif
  if constexpr (std::is_same_v<Task, StreamQkvTask>) {
    if (!stream.append.setup.prepared) ptx::wait_for_dependencies();
    epilogue.load_rows();
  }
  sync_cluster(task);
  ptx::wait_for_dependencies();
  SWIFTSPEC_STAMP(task, kDependencies);
  constexpr bool kInPlace = kNormed && ptx::kBulk;
  auto* pieces = reinterpret_cast<uint4*>(shared + task.smem.x);
  if constexpr (kNormed) {
    norm_scales<1>(task, at, 0, kInPlace ? pieces : nullptr, shared);
    await_norm(task, at, shared);
  }
  SWIFTSPEC_STAMP(task, kNormScales);
  const int range = t.range(at.cta);
  stage_activations<true, 1, kNormed>(task, at, static_cast<int64_t>(t.first_tile(at.cta)) * t.tile_k,
                                      range * t.tile_k / tiles::kBlock, kInPlace, shared);
  SWIFTSPEC_STAMP(task, kStagedByWarp);
  __syncthreads();
  SWIFTSPEC_STAMP(task, kStaged);
  const auto* x_sums = reinterpret_cast<const float*>(shared + task.smem.sums);
  const int group_log = kWhole ? 2 : t.group_log;
#pragma unroll 1
  for (int strip = 0; strip < epilogue.strips() + 2; ++strip) {  // the last two only advance
    if (strip < epilogue.strips()) {
      Sums<1> sums;
      clear<1>(sums);
#pragma unroll 1
      for (int tile = at.warp; tile < range; tile += kWarps) {
        const StagedInputs<1> x{pieces + tiles::x_piece(tile * 4, 1, 0, 0), x_sums + tile * (4 >> group_log) * 8, at.lane};
        multiply_groups<1>(sums, ring.wait(), x, group_log, at.lane);
        ring.release();
      }
      SWIFTSPEC_STAMP(task, kLastTile);
      if (strip + 1 == epilogue.strips()) {  // its own weights have been read
        prefetch_tiles(task, static_cast<int>(blockIdx.x) * kWarps + at.warp, at.lane);
      }
      epilogue.store(strip, sums);
    }
    epilogue.advance(strip);
  }
  SWIFTSPEC_STAMP(task, kStored);
  if (t.cluster() > 1) ptx::cluster_meet();  // no CTA exits while another one writes to its shared memory
  SWIFTSPEC_STAMP(task, kExit);
}

template <class Task>
using Kernel = void (*)(Task);

Kernel<StreamTask> kernel_for(bool normed, bool whole) {
  using Task = StreamTask;
  if (normed) return whole ? stream_kernel<true, true, Task> : stream_kernel<true, false, Task>;
  return whole ? stream_kernel<false, true, Task> : stream_kernel<false, false, Task>;
}

Kernel<StreamQkvTask> qkv_kernel_for(bool whole) {
  return whole ? stream_kernel<true, true, StreamQkvTask> : stream_kernel<true, false, StreamQkvTask>;
}

}  // namespace

void prepare_stream(const Device& device) {
  for (const int kind : {0, 1, 2, 3}) allow_shared_memory("linear", kernel_for(kind % 2 == 1, kind / 2 == 1), device.shared);
  for (const bool whole : {false, true}) allow_shared_memory("linear", qkv_kernel_for(whole), device.shared);
}

void linear_stream(const LinearArgs& args, Stream stream) {
  const Weights& w = *args.weights;
  const tiles::Tiling& t = w.tiling;
  const bool normed = args.norm != nullptr;
  StreamTask task{};
  const tiles::SmemLayout smem = tiles::stream_smem_layout(t, w.device, normed, task.barriers);
  const int clusters = std::clamp(t.strips, 1, tiles::concurrent_clusters(t, 1, w.device));
  task.each = task_of(args, smem, clusters, static_cast<int64_t>(clusters) * t.cluster() * kWarps);
  const Launch how{.grid = dim3(static_cast<unsigned>(clusters * t.cluster())), .threads = kThreads,
                   .cluster = t.cluster(), .shared = smem.total, .early = true};
#ifdef SWIFTSPEC_STAMPS
  task.each.stamps = stamp_records(w, int64_t{how.grid.x} * kWarps);
#endif
  if (args.append != nullptr) {
    return launch("linear", qkv_kernel_for(t.group_log == 2), how, stream, StreamQkvTask{task, *args.append});
  }
  launch("linear", kernel_for(normed, t.group_log == 2), how, stream, task);
}

}  // namespace swiftspec::cuda
