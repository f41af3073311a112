// x for all launches of a product that wide.cu computes, as its warps read it. wide.h says where it lies.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/linear/linear.cuh"
#include "cuda/linear/wide.h"
#include "cuda/shared.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

using tiles::kPartEights;
using tiles::kThreads;
using tiles::kWarps;

constexpr int kBlocks = 256;  // about, where so many have something to do
constexpr int kScales = tiles::kMaxRows * sizeof(float), kShared = 2 * kScales;  // behind as many squares

struct ArrangeTask {
  LinearTask each;     // of all rows; its carve has the offsets that the norm needs
  int32_t parts, all;  // as part_at takes them
  uint8_t* slabs;
};

// Blocks of inputs that a warp takes together: a group of int4, whose sum is one.
template <bool kInt4>
SWIFTSPEC_HD int together_log(const tiles::Tiling& t) {
  return kInt4 ? t.group_log : 1;
}

// x, normalised, with the sums of its groups. A cluster has eight rows; its blocks cut the inputs as those of a product
// do, so that each squares its own, all at a time, and the sums of squares are added in the same order.
template <bool kInt4>
__global__ void __launch_bounds__(kThreads) arrange_kernel(const __grid_constant__ ArrangeTask arrange) {
  uint8_t* shared = dynamic_shared();
  const LinearTask& task = arrange.each;
  const tiles::Tiling& t = task.tiling;
  const int eight = static_cast<int>(blockIdx.x) >> t.cluster_log, part = eight / kPartEights, j = eight % kPartEights;
  const ThreadIndex at{eight, static_cast<int>(ptx::cluster_rank()), static_cast<int>(threadIdx.x) / 32,
                       static_cast<int>(threadIdx.x) % 32};
  ask_norm(task, at);
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  if (task.norm != nullptr) norm_scales<1>(task, at, 8 * eight, shared);
  const float* scale = reinterpret_cast<const float*>(shared + task.carve.scales) + fragment::b_column(at.lane);
  const int log = together_log<kInt4>(t), groups = t.tile_k / tiles::kBlock >> log, units = t.range(at.cta) * groups;
  for (int unit = static_cast<int>(blockIdx.y) * kWarps + at.warp; unit < units; unit += gridDim.y * kWarps) {
    const int tile = t.first_tile(at.cta) + unit / groups, group = unit % groups;
    uint8_t* to = arrange.slabs + tiles::part_at(t, arrange.parts, arrange.all, part, tile);
    const int64_t first = static_cast<int64_t>(tile) * t.tile_k + (group << log) * tiles::kBlock;
    auto* pieces = reinterpret_cast<uint4*>(to) + tiles::x_piece(group << log, kPartEights, j, at.lane);
    auto* sums = reinterpret_cast<float*>(to + tiles::slab_sums(t)) + group * tiles::kMaxRows;
    stage_group<kInt4>(task, tiles::x_row(eight, at.lane), first, at.lane, scale, pieces, kPartEights * 32,
                       sums + tiles::x_row(j, at.lane));
  }
  if (task.norm != nullptr) ptx::cluster_meet();  // nobody leaves while another reads its squares
}

}  // namespace

void prepare_arrange() {
  allow_shared("linear", arrange_kernel<true>, kShared);
  allow_shared("linear", arrange_kernel<false>, kShared);
}

void arrange(const LinearArgs& a, int parts, int all, void* slabs, Stream stream) {
  const tiles::Tiling& t = a.weights->tiling;
  ArrangeTask task{{}, parts, all, static_cast<uint8_t*>(slabs)};
  task.each.tiling = t;
  task.each.carve.scales = kScales;
  task.each.x = static_cast<const uint16_t*>(a.x);
  task.each.norm = static_cast<const uint16_t*>(a.norm);
  task.each.eps = a.eps;
  task.each.rows = static_cast<int32_t>(a.rows);
  const bool int4 = t.group != 0;
  const int log = int4 ? together_log<true>(t) : together_log<false>(t);
  const int64_t units = tiles::ceil_div(t.tiles, t.cluster()) * (t.tile_k / tiles::kBlock >> log);
  const auto across = static_cast<unsigned>(all * kPartEights * t.cluster());
  const int64_t down = std::clamp<int64_t>(kBlocks / across, 1, tiles::ceil_div(units, kWarps));
  const Launch how{.grid = dim3(across, static_cast<unsigned>(down)), .threads = kThreads, .cluster = t.cluster(),
                   .shared = kShared, .early = true};
  launch("linear", int4 ? arrange_kernel<true> : arrange_kernel<false>, how, stream, task);
}

}  // namespace swiftspec::cuda
