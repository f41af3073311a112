// Projections of up to 8 rows by blocks that end early; see direct.h.
#include "cuda/linear/direct.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/linear/epilogue.cuh"
#include "cuda/linear/rope_epilogue.h"
#include "cuda/shared.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

using tiles::kDirectTiles;

struct DirectTask {
  LinearTask each;  // its smem is not set
  tiles::DirectSmemLayout smem;
};

// Of a QKV projection that appends to the cache.
struct DirectQkvTask : DirectTask {
  RopeAppend append;
};

// The tiles of a warp: all of them are requested before the first is awaited, each with its own mbarrier.
template <int kWarps, int kStrips>
class RequestedTiles {
 public:
  __device__ RequestedTiles(const DirectTask& direct, const ThreadIndex& at, uint8_t* shared)
      : bytes_(direct.each.tiling.tile_bytes),
        slots_(shared + at.warp * direct.smem.warp_tiles * kStrips * bytes_),
        arrived_(reinterpret_cast<uint64_t*>(shared + direct.smem.barriers) + at.warp * direct.smem.warp_tiles * kStrips) {
    const tiles::Tiling& t = direct.each.tiling;
    const int range = t.range(at.cta), first = t.first_tile(at.cta);
    if (at.lane == 0) {
      for (int i = 0; i < direct.smem.warp_tiles * kStrips; ++i) ptx::barrier_init(arrived_ + i);
      ptx::fence_barrier_init();
    }
    if constexpr (ptx::kLoaders > 1) __syncwarp();
    if (at.lane < ptx::kLoaders) {
      const uint64_t policy = ptx::evict_first();
      for (int i = 0; i * kWarps + at.warp < range; ++i) {
        for (int s = 0; s < kStrips; ++s) {
          const int64_t from = t.tile_at(at.cluster * kStrips + s, first + i * kWarps + at.warp);
          ptx::bulk_load(slot(i, s), direct.each.weights + from, bytes_, arrived_ + i * kStrips + s, policy, at.lane);
        }
      }
    }
    __syncwarp();
  }

  __device__ const uint8_t* wait(int tile, int strip) {
    ptx::barrier_wait(arrived_ + tile * kStrips + strip, 0);
    return slot(tile, strip);
  }

 private:
  __device__ uint8_t* slot(int tile, int strip) const { return slots_ + (tile * kStrips + strip) * bytes_; }

  int bytes_;
  uint8_t* slots_;
  uint64_t* arrived_;
};

// The inputs of a warp's tiles in registers, as B operands: eight inputs of row lane / 4 in each block.
using Inputs = uint4[kDirectTiles][4];

// Starts the copy of this CTA's part of the RMSNorm weight to shared memory. Without bulk copies it is read from global
// memory.
__device__ inline void request_norm(const DirectTask& direct, const ThreadIndex& at, uint8_t* shared) {
  const NormPart part = norm_part(direct.each, at.cta);
  if (!ptx::kBulk || threadIdx.x != 0 || part.bytes == 0) return;
  auto* barrier = reinterpret_cast<uint64_t*>(shared + direct.smem.norm_barrier);
  ptx::barrier_init(barrier);
  ptx::fence_barrier_init();
  ptx::bulk_load(shared + direct.smem.norm, part.weight, part.bytes, barrier, ptx::evict_last(), 0);
}

template <int kWarps>
__device__ void load_inputs(const LinearTask& task, const ThreadIndex& at, Inputs& x) {
  const tiles::Tiling& t = task.tiling;
#pragma unroll
  for (int i = 0; i < kDirectTiles; ++i) {
    const int tile = i * kWarps + at.warp;
    const int64_t first = static_cast<int64_t>(t.first_tile(at.cta) + tile) * t.tile_k;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      x[i][b] = tile < t.range(at.cta)
                    ? load_piece(task.x, tiles::x_row(0, at.lane), task.rows, first + tiles::x_input(b, at.lane), t.k)
                    : uint4{};
    }
  }
}

// The RMSNorm factor of the lane's row. The sum of squares has the order of squares_of and norm_scales.
template <int kWarps>
__device__ float row_scale(const DirectTask& direct, const ThreadIndex& at, const Inputs& x, uint8_t* shared) {
  constexpr int kEach = tiles::kShares / kWarps;  // shares of a warp
  auto* squares = reinterpret_cast<float*>(shared + direct.smem.squares);
  float sums[kEach] = {};
#pragma unroll
  for (int i = 0; i < kDirectTiles; ++i) {
#pragma unroll
    for (int b = 0; b < 4; ++b) sums[i % kEach] = add_squares(sums[i % kEach], x[i][b]);
  }
  const int row = tiles::x_row(0, at.lane);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
    sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
    if (at.lane % 4 == 0) squares[row * tiles::kShares + i * kWarps + at.warp] = sums[i];
  }
  __syncthreads();
  const auto* mine = reinterpret_cast<const float4*>(squares + row * tiles::kShares);
  const float4 a = mine[0], b = mine[1];
  const float own = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
  const int ctas = direct.each.tiling.cluster();
  if (!ptx::kClusters || ctas == 1) return norm_scale(direct.each, own);
  auto* totals = reinterpret_cast<float*>(shared + direct.smem.totals);
  if (at.warp == 0 && at.lane % 4 == 0) totals[row] = own;
  ptx::cluster_sync();
  float sum = 0;
  for (int cta = 0; cta < ctas; ++cta) sum += ptx::remote_load(totals + row, cta);
  return norm_scale(direct.each, sum);
}

// Applies the RMSNorm to the inputs of a tile. `norm`: the weight of these inputs, of which `left` exist.
__device__ inline void normalise(const uint16_t* norm, int64_t left, int lane, float scale, uint4 (&x)[4]) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const uint4 weight = load_piece(norm, 0, 1, tiles::x_input(b, lane), left);
    x[b] = {tiles::normalised(x[b].x, scale, weight.x), tiles::normalised(x[b].y, scale, weight.y),
            tiles::normalised(x[b].z, scale, weight.z), tiles::normalised(x[b].w, scale, weight.w)};
  }
}

// The inputs of a tile and the sums of its groups, which are stored at the last block of each group.
struct HeldInputs {
  const uint4 (&pieces)[4];
  float2 sums[4];

  __device__ HeldInputs(const uint4 (&x)[4], int group_log, int lane) : pieces(x) {
    float sum = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t words[4] = {x[b].x, x[b].y, x[b].z, x[b].w};
      sum += tiles::sum8(words);
      sums[b] = {};
      if ((b + 1) >> group_log == b >> group_log) continue;  // the group continues in the next block
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int from = 4 * fragment::c_column(lane, 0);  // a lane with that row of x
      sums[b] = {__shfl_sync(0xffffffffu, sum, from), __shfl_sync(0xffffffffu, sum, from + 4)};
      sum = 0;
    }
  }
  __device__ uint4 piece(int block, int) const { return pieces[block]; }
  __device__ float2 group_sums(int, int block, int) const { return sums[block]; }
};

// The sums of all warps of a strip in the order of the warps, from `partial`: [strip][warp][fragment][lane].
template <int kWarps>
__device__ float4 sum_of_warps(const float4* partial, int strip, int f, int lane) {
  float4 total = partial[(strip * kWarps * 2 + f) * 32 + lane];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    const float4 next = partial[((strip * kWarps + warp) * 2 + f) * 32 + lane];
    total = {total.x + next.x, total.y + next.y, total.z + next.z, total.w + next.w};
  }
  return total;
}

// Warps per SM that the registers must allow; sixteen would spill on sm_120.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kResidentWarps = 12;
#else
constexpr int kResidentWarps = 16;
#endif

// A kernel for each kind of projection, since its code runs once per block: a loop over the tiles, whose inputs move on
// through the registers. kWhole: quantisation groups are whole tiles.
template <int kWarps, int kStrips, bool kNormed, bool kWhole, class Task>
__global__ void __launch_bounds__(32 * kWarps, kResidentWarps / kWarps)
    direct_kernel(const __grid_constant__ Task direct) {
  constexpr bool kAppends = std::is_same_v<Task, DirectQkvTask>;
  uint8_t* shared = dynamic_shared();
  const LinearTask& task = direct.each;
  const tiles::Tiling& t = task.tiling;
  const ThreadIndex at{static_cast<int>(blockIdx.x) >> t.cluster_log, static_cast<int>(ptx::cluster_rank()),
                       static_cast<int>(threadIdx.x) / 32, static_cast<int>(threadIdx.x) % 32};
  SWIFTSPEC_STAMP(task, kStart);
  if constexpr (kNormed) request_norm(direct, at, shared);
  RequestedTiles<kWarps, kStrips> requested(direct, at, shared);
  SWIFTSPEC_STAMP(task, kRing);
  ptx::launch_dependents();
#ifdef SWIFTSPEC_STAMPS
  stamps::touch_pages(task.touched, task.touched_bytes);
#endif
  // a strip is stored by a warp of one of the CTAs
  const int ctas = t.cluster(), range = t.range(at.cta);
  const bool stores = at.warp < kStrips && at.warp % ctas == at.cta;
  Unit unit;
  unit.strip = at.cluster * kStrips + at.warp, unit.j = 0;
  auto* partial = reinterpret_cast<float4*>(shared + direct.smem.partial);
  const auto place = [&](int strip, int f) { return ((strip * kWarps + at.warp) * 2 + f) * 32 + at.lane; };
  if constexpr (kAppends) {
    if (!direct.append.setup.prepared) ptx::wait_for_dependencies();
    if (stores) {
      const RopePairs rope =
          load_rope(t, direct.append.setup, appended_rows(direct.append.setup, at.lane), unit.strip, at.lane);
      // kept where the warp's own sums will be, since the inputs take the registers
      *reinterpret_cast<uint4*>(partial + place(0, 0)) = {rope.cos[0][0], rope.cos[0][1], rope.cos[1][0], rope.cos[1][1]};
      *reinterpret_cast<uint4*>(partial + place(0, 1)) = {rope.sin[0][0], rope.sin[0][1], rope.sin[1][0], rope.sin[1][1]};
    }
  }
  ptx::wait_for_dependencies();
  SWIFTSPEC_STAMP(task, kDependencies);
  Inputs x;
  load_inputs<kWarps>(task, at, x);
  Outputs to = task.to;
  [[maybe_unused]] ResidualPairs residual{};
  [[maybe_unused]] float scale = 1;
  if constexpr (kNormed) {
    scale = row_scale<kWarps>(direct, at, x, shared);
  } else if (stores && to.residual != nullptr) {
    residual = load_residual(t, to, at.lane, unit);
  }
  SWIFTSPEC_STAMP(task, kNormScales);
  const int64_t begin = static_cast<int64_t>(t.first_tile(at.cta)) * t.tile_k;
  const uint16_t* norm = ptx::kBulk ? reinterpret_cast<const uint16_t*>(shared + direct.smem.norm) : task.norm + begin;
  if (kNormed && ptx::kBulk && range > 0) {
    ptx::barrier_wait(reinterpret_cast<uint64_t*>(shared + direct.smem.norm_barrier), 0);
  }
  Sums<1> sums[kStrips];
#pragma unroll
  for (int s = 0; s < kStrips; ++s) clear<1>(sums[s]);
  const int group_log = kWhole ? 2 : t.group_log;
#pragma unroll 1
  for (int i = 0; i * kWarps + at.warp < range; ++i) {
    const int64_t first = static_cast<int64_t>(i * kWarps + at.warp) * t.tile_k;
    if constexpr (kNormed) normalise(norm + first, t.k - begin - first, at.lane, scale, x[0]);
    const HeldInputs held(x[0], group_log, at.lane);
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      const uint8_t* weights = requested.wait(i, s);
      if (i == 0 && s == 0) SWIFTSPEC_STAMP(task, kFirstTile);
      multiply_groups<1>(sums[s], weights, held, group_log, at.lane);
    }
#pragma unroll
    for (int piece = 0; piece < 4 * (kDirectTiles - 1); ++piece) x[piece / 4][piece % 4] = x[piece / 4 + 1][piece % 4];
  }
  SWIFTSPEC_STAMP(task, kLastTile);
  prefetch_tiles(task, static_cast<int>(blockIdx.x) * kWarps + at.warp, at.lane);
  [[maybe_unused]] AppendedRows rows;
  [[maybe_unused]] RopePairs rope;
  if constexpr (kAppends) {
    rows = appended_rows(direct.append.setup, at.lane);
    const uint4 cos = *reinterpret_cast<const uint4*>(partial + place(0, 0));
    const uint4 sin = *reinterpret_cast<const uint4*>(partial + place(0, 1));
    rope = {{{cos.x, cos.y}, {cos.z, cos.w}}, {{sin.x, sin.y}, {sin.z, sin.w}}};
  }
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      const float(&sum)[4] = sums[s][f][0];
      partial[place(s, f)] = {sum[0], sum[1], sum[2], sum[3]};
    }
  }
  __syncthreads();
  SWIFTSPEC_STAMP(task, kWarpSum);
  auto* joined = reinterpret_cast<float4*>(shared + direct.smem.joined);
  if (at.warp < kStrips) {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      const float4 v = sum_of_warps<kWarps>(partial, at.warp, f, at.lane);
      const float own[4] = {0 + v.x, 0 + v.y, 0 + v.z, 0 + v.w};  // as reduce_cluster, for the sign of zero
      if (ctas == 1) {
        set_sums(unit, f, own);
      } else {
        joined[(at.warp * 2 + f) * 32 + at.lane] = v;
      }
    }
  }
  if (ptx::kClusters && ctas > 1) {
    ptx::cluster_sync();
    SWIFTSPEC_STAMP(task, kClusterBarrier);
    if (stores) {
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        const float4 v = reduce_cluster(joined + (at.warp * 2 + f) * 32 + at.lane, ctas);
        const float own[4] = {v.x, v.y, v.z, v.w};
        set_sums(unit, f, own);
      }
    }
  }
  if (stores) {
    add_bias(t, to, at.lane, unit);
    if (!kNormed && to.residual != nullptr) add_residual(residual, unit);
    to.residual = nullptr;
    if constexpr (!kNormed) to.swiglu = false, to.logits = nullptr;
    if constexpr (kAppends) {
      append_unit(t, direct.append, rows, rope, at.lane, unit);
    } else {
      store_unit(t, to, at.lane, unit);
    }
  }
  SWIFTSPEC_STAMP(task, kStored);
  if (ctas > 1) ptx::cluster_meet();  // no CTA exits while another one reads its shared memory
  SWIFTSPEC_STAMP(task, kExit);
}

template <class Task>
using Kernel = void (*)(Task);

template <bool kNormed, bool kWhole, class Task>
Kernel<Task> kernel_of(const tiles::DirectShape& shape) {
  if (shape.warps == 8) return direct_kernel<8, 1, kNormed, kWhole, Task>;
  return shape.strips == 1 ? direct_kernel<4, 1, kNormed, kWhole, Task> : direct_kernel<4, 2, kNormed, kWhole, Task>;
}

Kernel<DirectTask> kernel_for(const tiles::DirectShape& shape, bool normed, bool whole) {
  using Task = DirectTask;
  if (normed) return whole ? kernel_of<true, true, Task>(shape) : kernel_of<true, false, Task>(shape);
  return whole ? kernel_of<false, true, Task>(shape) : kernel_of<false, false, Task>(shape);
}

Kernel<DirectQkvTask> qkv_kernel_for(const tiles::DirectShape& shape, bool whole) {
  return whole ? kernel_of<true, true, DirectQkvTask>(shape) : kernel_of<true, false, DirectQkvTask>(shape);
}

}  // namespace

void prepare_direct(const Device& device) {
  for (const tiles::DirectShape& shape : tiles::kDirectShapes) {
    for (const int kind : {0, 1, 2, 3}) {
      allow_shared_memory("linear", kernel_for(shape, kind % 2 == 1, kind / 2 == 1), device.shared);
    }
    for (const bool whole : {false, true}) allow_shared_memory("linear", qkv_kernel_for(shape, whole), device.shared);
  }
}

void linear_direct(const LinearArgs& args, Stream stream) {
  const tiles::Tiling& t = args.weights->tiling;
  const int blocks = tiles::direct_blocks(t);
  DirectTask task{task_of(args, {}, blocks / t.cluster(), static_cast<int64_t>(blocks) * t.warps_k()),
                  tiles::direct_smem_layout(t)};
#ifdef SWIFTSPEC_STAMPS
  task.each.stamps = stamp_records(*args.weights, static_cast<int64_t>(blocks) * t.warps_k());
#endif
  const Launch how{.grid = dim3(static_cast<unsigned>(blocks)), .threads = 32 * t.warps_k(), .cluster = t.cluster(),
                   .shared = task.smem.total, .early = true};
  const tiles::DirectShape shape{t.warps_k(), t.block_strips};
  const bool whole = t.group_log == 2;
  if (args.append != nullptr) {
    return launch("linear", qkv_kernel_for(shape, whole), how, stream, DirectQkvTask{task, *args.append});
  }
  launch("linear", kernel_for(shape, args.norm != nullptr, whole), how, stream, task);
}

}  // namespace swiftspec::cuda
