// Projections with large M (more than 32 rows), which read the weights once for up to 64 (int4) or 128 (bf16) rows. See
// large_m.h.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/linear/epilogue.cuh"
#include "cuda/linear/large_m.h"
#include "cuda/shared.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

using tiles::kPartRows8;

constexpr int kDensePart = 64 * tiles::kMaxRows * 2;  // part_bytes of bf16

struct LargeMTask {
  LinearTask each;       // its tiling has one strip per warp; of its smem only the offsets of the ring are set
  tiles::Tiling order;   // tiling of the weight: the order of the tiles and of the sums
  tiles::LargeMSmemLayout smem;
  const uint8_t* slabs;  // [order.tiles]
};

// Shared-memory pipeline of the slabs of a CTA, in the order of its tiles; the first warp issues the copies.
class SlabPipeline {
 public:
  __device__ SlabPipeline(const LargeMTask& large_m, const ThreadIndex& at, uint8_t* shared, int bytes,
                          const tiles::LargeMTileIterator& tiles_of)
      : wide_(large_m),
        loads_(at.warp == 0 && at.lane < ptx::kLoaders),
        lane_(at.lane),
        bytes_(bytes),
        slots_(shared + large_m.smem.slabs),
        full_(reinterpret_cast<uint64_t*>(shared + large_m.smem.slab_barriers)),
        next_tile_(tiles_of) {}

  // `prepare` initialises the barriers, before any thread waits; `start` issues the first copies, once x is there.
  __device__ void prepare() {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < wide_.smem.slab_count; ++slot) ptx::barrier_init(full_ + slot);
      ptx::fence_barrier_init();
    }
    __syncthreads();
  }
  __device__ void start() {
    if (!loads_) return;
    ptx::fence_bulk_loads();
    policy_ = ptx::evict_last();  // every cluster reads them
    for (int slot = 0; slot < wide_.smem.slab_count; ++slot) fetch(slot);
  }

  __device__ const uint8_t* wait() {
    ptx::barrier_wait(full_ + slot_, parity_);
    return slots_ + slot_ * bytes_;
  }

  // To be called after all threads have read the slab: loads the next one in its place.
  __device__ void release() {
    __syncthreads();
    if (loads_) fetch(slot_);
    if (++slot_ < wide_.smem.slab_count) return;
    slot_ = 0;
    parity_ ^= 1;
  }

 private:
  __device__ void fetch(int slot) {
    if (next_tile_.done()) return;
    const uint8_t* from = wide_.slabs + static_cast<int64_t>(next_tile_.tile) * bytes_;
    ptx::bulk_load(slots_ + slot * bytes_, from, static_cast<uint32_t>(bytes_), full_ + slot, policy_, lane_);
    next_tile_.next();
  }

  const LargeMTask& wide_;
  bool loads_;
  int lane_, bytes_;
  uint8_t* slots_;
  uint64_t* full_;
  tiles::LargeMTileIterator next_tile_;
  uint64_t policy_ = 0;
  int slot_ = 0;
  uint32_t parity_ = 0;
};

// Adds the sums of a share to the warp's sums of its strip.
template <int kParts>
__device__ void add_share(const Sums<kPartRows8> (&sums)[kParts], const ThreadIndex& at, bool first, float4* joined) {
#pragma unroll
  for (int i = 0; i < 2 * kPartRows8 * kParts; ++i) {
    const int f = i % 2, j = i / 2;
    const float(&s)[4] = sums[j / kPartRows8][f][j % kPartRows8];
    float4& total = joined[tiles::partial_at(at.warp, kPartRows8 * kParts, j, f, at.lane)];
    total = first ? float4{s[0], s[1], s[2], s[3]}
                  : float4{total.x + s[0], total.y + s[1], total.z + s[2], total.w + s[3]};
    if (i % 8 == 7) __syncwarp();  // as in multiply_parts
  }
}

// Multiplies a tile with the rows of every part. The __syncwarp between parts keeps the compiler from hoisting the
// loads of later parts, which would need more registers.
template <bool kInt4, int kParts>
__device__ void multiply_parts(const LargeMTask& large_m, Sums<kPartRows8> (&sums)[kParts], const uint8_t* weights,
                               const uint8_t* slab, int lane) {
  if constexpr (kInt4) {
    const int part_bytes = tiles::part_bytes(large_m.order);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint8_t* x = slab + part * part_bytes;
      const StagedInputs<kPartRows8> inputs{
          reinterpret_cast<const uint4*>(x), reinterpret_cast<const float*>(x + tiles::slab_sums(large_m.order)), lane};
      multiply_int4<kPartRows8>(sums[part], weights, inputs, large_m.order.group_log, lane);
      __syncwarp();
    }
    return;
  }
  const auto* words = reinterpret_cast<const uint32_t*>(weights);
#pragma unroll 1
  for (int block = 0; block < 2; ++block) {
    uint4 a[2][2];  // [odd step][fragment]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i / 2][i % 2] = *reinterpret_cast<const uint4*>(words + tiles::dense_word(2 * block + i / 2, lane, i % 2, 0));
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const auto* pieces = reinterpret_cast<const uint4*>(slab + part * kDensePart);
#pragma unroll
      for (int j = 0; j < kPartRows8; ++j) {
        const uint4 b = pieces[tiles::x_piece(block, kPartRows8, j, lane)];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4& mine = a[i / 2][i % 2];
          ptx::mma(sums[part][i % 2][j], mine.x, mine.y, mine.z, mine.w, i < 2 ? b.x : b.z, i < 2 ? b.y : b.w);
        }
      }
      __syncwarp();
    }
  }
}

// Computes the sums of a strip over this CTA's inputs, share by share. A warp without a strip only takes part in the
// barriers.
template <bool kInt4, int kParts>
__device__ void multiply_strip(const LargeMTask& large_m, const ThreadIndex& at, bool mine,
                               Ring<tiles::LargeMTileIterator>& ring, SlabPipeline& slabs, float4* joined) {
  const tiles::Tiling& t = large_m.order;
  for (int share = 0; share < t.warps_k(); ++share) {
    Sums<kPartRows8> sums[kParts];
#pragma unroll
    for (auto& part : sums) clear<kPartRows8>(part);
    for (int tile = t.first_tile(at.cta) + share; tile < t.first_tile(at.cta + 1); tile += t.warps_k()) {
      const uint8_t* slab = slabs.wait();
      if (mine) {
        multiply_parts<kInt4, kParts>(large_m, sums, ring.wait(), slab, at.lane);
        ring.release();
      }
      slabs.release();
    }
    add_share<kParts>(sums, at, share == 0, joined);
  }
}

template <bool kInt4, int kParts, int kLog>
__global__ void __launch_bounds__(32 << kLog, 1) large_m_kernel(const __grid_constant__ LargeMTask large_m) {
  constexpr int kTotalRows8 = kPartRows8 * kParts;
  uint8_t* shared = dynamic_shared();
  const LinearTask& task = large_m.each;
  const ThreadIndex at{static_cast<int>(blockIdx.x) >> large_m.order.cluster_log, static_cast<int>(ptx::cluster_rank()),
                       static_cast<int>(threadIdx.x) / 32, static_cast<int>(threadIdx.x) % 32};
  const auto tiles_of = [&](int warp) {
    return tiles::large_m_tiles(large_m.order, kLog, at.cluster, task.clusters, at.cta, warp);
  };
  Ring ring(task, at, shared, tiles_of(at.warp));
  SlabPipeline slabs(large_m, at, shared, tiles::slab_bytes(large_m.order, kParts), tiles_of(0));
  slabs.prepare();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  slabs.start();
  auto* joined = reinterpret_cast<float4*>(shared);
  for (int turn = at.cluster; turn < task.tiling.turns(); turn += task.clusters) {
    const int strip = turn << kLog;
    multiply_strip<kInt4, kParts>(large_m, at, strip + at.warp < large_m.order.strips, ring, slabs, joined);
    if (turn + task.clusters >= task.tiling.turns()) {
      prefetch_tiles(task, static_cast<int>(blockIdx.x << kLog) + at.warp, at.lane);
    }
    ptx::cluster_sync();
    for_each_unit<kTotalRows8>(task, at, 1 << kLog, strip, [&](Unit& unit) {
      read_unit<kTotalRows8>(task, at, strip, joined, unit);
      add_bias(task.tiling, task.to, at.lane, unit);
      store_unit(task.tiling, task.to, at.lane, unit);
    });
    ptx::cluster_sync();  // no warp adds to sums that another CTA still reads
  }
}

using Kernel = void (*)(LargeMTask);

Kernel kernel_for(bool int4, int parts, int log) {
  if (int4) return large_m_kernel<true, 2, 3>;
  if (parts == 4) return large_m_kernel<false, 4, 3>;
  return log == 3 ? large_m_kernel<false, 2, 3> : large_m_kernel<false, 2, 2>;
}

LargeMTask task_of(const LinearArgs& a, int parts, const uint8_t* slabs) {
  const Weights& w = *a.weights;
  LargeMTask large_m{};
  large_m.order = w.tiling;
  large_m.smem = tiles::large_m_smem_layout(w.tiling, parts, w.device);
  large_m.slabs = slabs;
  LinearTask& each = large_m.each;
  each.tiling = tiles::with_split(w.tiling, tiles::large_m_warps_log(w.device), w.tiling.cluster_log);
  each.smem.ring = large_m.smem.ring;
  each.smem.stages = large_m.smem.stages;
  each.smem.barriers = large_m.smem.barriers;
  each.weights = static_cast<const uint8_t*>(w.data);
  each.rows = static_cast<int32_t>(a.rows);
  each.clusters = std::clamp(each.tiling.turns(), 1, static_cast<int>(w.device.max_clusters[w.tiling.cluster_log]));
  each.to = {w.bias, static_cast<const uint16_t*>(a.residual), static_cast<uint16_t*>(a.out), a.logits, a.swiglu,
             each.rows};
  each.next = w.next;
  each.next_bytes = w.next_bytes;
  const int64_t ctas = static_cast<int64_t>(each.clusters) * w.tiling.cluster();
  each.next_slice_bytes = tiles::slice_bytes(w.next_bytes, ctas * each.tiling.warps_n());
  return large_m;
}

}  // namespace

void prepare_large_m(const Device& device) {
  prepare_pack_activations();
  for (const bool int4 : {false, true}) {
    for (const int parts : {2, 4})
      allow_shared_memory("linear", kernel_for(int4, parts, tiles::large_m_warps_log(device)), device.shared);
  }
}

int64_t large_m_scratch_bytes(const Weights& weights, int64_t rows) {
  const tiles::Tiling& t = weights.tiling;
  return static_cast<int64_t>(tiles::total_parts(t, rows, weights.device)) * t.tiles * tiles::part_bytes(t);
}

int64_t linear_large_m(const LinearArgs& args, void* scratch, Stream stream) {
  const Weights& w = *args.weights;
  const tiles::Tiling& t = w.tiling;
  const int most = tiles::large_m_parts(t, args.rows, w.device), all = tiles::total_parts(t, args.rows, w.device);
  auto* slabs = static_cast<uint8_t*>(scratch);
  if (all > 0) pack_activations(args, most, all, slabs, stream);
  for (int done = 0, parts = most; done < all; done += parts) {
    parts = std::min(most, all - done);
    const int64_t first = static_cast<int64_t>(done) * tiles::kMaxRows;
    const int64_t rows = std::min<int64_t>(args.rows - first, parts * tiles::kMaxRows);
    const LargeMTask large_m =
        task_of(slice_rows(args, first, rows), parts, slabs + tiles::part_offset(t, most, all, done, 0));
    const Launch how{.grid = dim3(static_cast<unsigned>(large_m.each.clusters * t.cluster())),
                     .threads = 32 * large_m.each.tiling.warps_n(),
                     .cluster = t.cluster(),
                     .shared = large_m.smem.total,
                     .early = true};
    launch("linear", kernel_for(t.group != 0, parts, tiles::large_m_warps_log(w.device)), how, stream, large_m);
  }
  return std::min<int64_t>(args.rows, all * tiles::kMaxRows);
}

}  // namespace swiftspec::cuda
