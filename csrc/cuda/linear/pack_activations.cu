// Activation packing: writes x, normalised, in the layout of the matrix units, for all launches of a product in
// large_m.cu. large_m.h defines the offsets.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/linear/linear.cuh"
#include "cuda/linear/large_m.h"
#include "cuda/shared.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

using tiles::kPartRows8;
using tiles::kThreads;
using tiles::kWarps;

constexpr int kBlocks = 256;  // target size of the grid
constexpr int kScales = tiles::kMaxRows * sizeof(float);  // offset of the scales, after as many squares
constexpr int kShared = 2 * kScales;

struct PackActivationsTask {
  LinearTask each;     // for all rows; of its smem only the offset of the scales is set
  int32_t parts, all;  // arguments of part_offset
  uint8_t* slabs;
};

// log2 of the blocks that a warp processes together: a quantisation group for int4, since its sum is one number.
template <bool kInt4>
SWIFTSPEC_HD int group_blocks_log(const tiles::Tiling& t) {
  return kInt4 ? t.group_log : 1;
}

// Packs x, normalised, and the sums of its groups. A cluster processes eight rows; its blocks split the inputs as those
// of a product do, so that the sums of squares are computed in parallel and added in the same order.
template <bool kInt4, bool kNormed>
__global__ void __launch_bounds__(kThreads) pack_activations_kernel(const __grid_constant__ PackActivationsTask pack) {
  uint8_t* shared = dynamic_shared();
  const LinearTask& task = pack.each;
  const tiles::Tiling& t = task.tiling;
  const int eight = static_cast<int>(blockIdx.x) >> t.cluster_log, part = eight / kPartRows8, j = eight % kPartRows8;
  const ThreadIndex at{eight, static_cast<int>(ptx::cluster_rank()), static_cast<int>(threadIdx.x) / 32,
                       static_cast<int>(threadIdx.x) % 32};
  if (kNormed && at.warp == 0) prefetch_norm(task, at);
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  if constexpr (kNormed) norm_scales<1>(task, at, 8 * eight, nullptr, shared);
  const float* scale = reinterpret_cast<const float*>(shared + task.smem.scales) + fragment::b_column(at.lane);
  const int log = group_blocks_log<kInt4>(t), groups = t.tile_k / tiles::kBlock >> log,
            units = t.range(at.cta) * groups;
  for (int unit = static_cast<int>(blockIdx.y) * kWarps + at.warp; unit < units; unit += gridDim.y * kWarps) {
    const int tile = t.first_tile(at.cta) + unit / groups, group = unit % groups;
    uint8_t* to = pack.slabs + tiles::part_offset(t, pack.parts, pack.all, part, tile);
    const int64_t first = static_cast<int64_t>(tile) * t.tile_k + (group << log) * tiles::kBlock;
    auto* pieces = reinterpret_cast<uint4*>(to) + tiles::x_piece(group << log, kPartRows8, j, at.lane);
    auto* sums = reinterpret_cast<float*>(to + tiles::slab_sums(t)) + group * tiles::kMaxRows;
    stage_group<kInt4, false, kNormed>(task, tiles::x_row(eight, at.lane), first, at.lane, scale, task.norm + first,
                                       pieces, kPartRows8 * 32, sums + tiles::x_row(j, at.lane));
  }
  if constexpr (kNormed) ptx::cluster_meet();  // no block exits while another one reads its squares
}

using Kernel = void (*)(PackActivationsTask);

Kernel kernel_for(bool int4, bool normed) {
  if (int4) return normed ? pack_activations_kernel<true, true> : pack_activations_kernel<true, false>;
  return normed ? pack_activations_kernel<false, true> : pack_activations_kernel<false, false>;
}

}  // namespace

void prepare_pack_activations() {
  for (const int kind : {0, 1, 2, 3}) allow_shared_memory("linear", kernel_for(kind % 2 == 1, kind / 2 == 1), kShared);
}

void pack_activations(const LinearArgs& a, int parts, int all, void* slabs, Stream stream) {
  const tiles::Tiling& t = a.weights->tiling;
  PackActivationsTask task{{}, parts, all, static_cast<uint8_t*>(slabs)};
  task.each.tiling = t;
  task.each.smem.scales = kScales;
  task.each.x = static_cast<const uint16_t*>(a.x);
  task.each.norm = static_cast<const uint16_t*>(a.norm);
  task.each.eps = a.eps;
  task.each.rows = static_cast<int32_t>(a.rows);
  const bool int4 = t.group != 0;
  const int log = int4 ? group_blocks_log<true>(t) : group_blocks_log<false>(t);
  const int64_t units = tiles::ceil_div(t.tiles, t.cluster()) * (t.tile_k / tiles::kBlock >> log);
  const auto across = static_cast<unsigned>(all * kPartRows8 * t.cluster());
  const int64_t down = std::clamp<int64_t>(kBlocks / across, 1, tiles::ceil_div(units, kWarps));
  const Launch how{.grid = dim3(across, static_cast<unsigned>(down)), .threads = kThreads, .cluster = t.cluster(),
                   .shared = kShared, .early = true};
  launch("linear", kernel_for(int4, a.norm != nullptr), how, stream, task);
}

}  // namespace swiftspec::cuda
