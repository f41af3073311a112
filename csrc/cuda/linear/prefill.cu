// Projections of long prefill chunks with the products of warpgroups (wgmma) of compute capability 9.0. See prefill.h.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/linear/epilogue.cuh"
#include "cuda/linear/prefill.h"
#include "cuda/shared.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {
namespace {

using tiles::kTileRows;
using tiles::kTileRows8;
using tiles::kTileStrips;

// ---- activations

constexpr int kPackThreads = 256;

struct PackSlabsTask {
  LinearTask each;  // its tiling, x, norm, eps and rows
  uint8_t* slabs;
};

struct WarpSquares {
  float of[kPackThreads / 32];
};

// The RMSNorm factor of a row, computed by a block.
__device__ float row_norm_scale(const LinearTask& task, int row) {
  float sum = 0;
  for (int64_t input = 8 * threadIdx.x; input < task.tiling.k; input += 8 * kPackThreads) {
    const uint4 piece = load_piece(task.x, row, task.rows, input, task.tiling.k);
    sum = add_squares(add_squares(sum, piece.x), piece.y);
    sum = add_squares(add_squares(sum, piece.z), piece.w);
  }
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  WarpSquares& squares = shared_variable<WarpSquares>();
  if (threadIdx.x % 32 == 0) squares.of[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (const float of_warp : squares.of) total += of_warp;
  return norm_scale(task, total);
}

// Eight inputs of a row, normalised by `scale` if there is a norm; zeros outside of x.
__device__ uint4 normalised_piece(const LinearTask& task, int row, int64_t input, float scale) {
  uint4 piece = load_piece(task.x, row, task.rows, input, task.tiling.k);
  if (task.norm == nullptr) return piece;
  const uint4 weight = load_piece(task.norm, 0, 1, input, task.tiling.k);
  return {tiles::normalised(piece.x, scale, weight.x), tiles::normalised(piece.y, scale, weight.y),
          tiles::normalised(piece.z, scale, weight.z), tiles::normalised(piece.w, scale, weight.w)};
}

// Packs a row of x per block; rows beyond x are zeros. The operands of a block of 32 inputs are the transpose of its
// 4 x 4 words.
__global__ void __launch_bounds__(kPackThreads) pack_slabs_kernel(const __grid_constant__ PackSlabsTask pack) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const LinearTask& task = pack.each;
  const tiles::Tiling& t = task.tiling;
  const int row = static_cast<int>(blockIdx.x), tile_row = row % kTileRows;
  const float scale = task.norm != nullptr ? row_norm_scale(task, row) : 1.0f;
  const int blocks = t.tile_k / tiles::kBlock;
  for (int i = static_cast<int>(threadIdx.x); i < t.tiles * blocks; i += kPackThreads) {
    const int tile = i / blocks, block = i % blocks;
    const int64_t slab = static_cast<int64_t>(row / kTileRows) * t.tiles + tile;
    uint8_t* to = pack.slabs + slab * tiles::prefill_slab_bytes(t);
    uint4 from[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      from[j] = normalised_piece(task, row, static_cast<int64_t>(i) * tiles::kBlock + 8 * j, scale);
    }
    const uint4 pieces[4] = {{from[0].x, from[1].x, from[2].x, from[3].x},
                             {from[0].y, from[1].y, from[2].y, from[3].y},
                             {from[0].z, from[1].z, from[2].z, from[3].z},
                             {from[0].w, from[1].w, from[2].w, from[3].w}};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      *reinterpret_cast<uint4*>(to + tiles::slab_piece(2 * block + p / 2, p % 2, tile_row)) = pieces[p];
    }
  }
}

// ---- products

constexpr int kConsumerWarps = 8;  // two warpgroups
constexpr int kProductThreads = 32 * kConsumerWarps + 32;  // and a warp that issues the copies
constexpr int kCopies = kTileStrips + 1;  // per stage: tiles of weights, and a slab

struct PrefillTask {
  tiles::Tiling tiling;
  tiles::PrefillSmemLayout smem;
  const uint8_t* weights;
  const uint8_t* slabs;
  Outputs to;
  int32_t row_tiles, clusters;
};

// Iterates over the stages of the ring and the phases of their barriers.
struct Stage {
  int32_t index = 0;
  uint32_t parity = 0;

  __device__ void next(int stages) {
    if (++index < stages) return;
    index = 0;
    parity ^= 1;
  }
};

// Index of a CTA, and its shared memory.
struct PrefillCta {
  int cluster, rank;
  uint8_t* shared;
  uint64_t *full, *empty;   // [stages]
  uint64_t *stored, *read;  // the sums of all CTAs of the cluster are in shared memory; all CTAs have read this one's
};

__device__ PrefillCta prefill_cta(const PrefillTask& task, uint8_t* shared) {
  auto* barriers = reinterpret_cast<uint64_t*>(shared + task.smem.barriers);
  return {static_cast<int>(blockIdx.x) >> task.tiling.cluster_log,
          static_cast<int>(ptx::cluster_rank()),
          shared,
          barriers,
          barriers + tiles::kMaxPrefillStages,
          barriers + 2 * tiles::kMaxPrefillStages,
          barriers + 2 * tiles::kMaxPrefillStages + 1};
}

__device__ void init_barriers(const PrefillTask& task, const PrefillCta& at) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < task.smem.stages; ++stage) {
      ptx::barrier_init(at.full + stage, kCopies);
      ptx::barrier_init(at.empty + stage, kConsumerWarps);
    }
    const auto warps = static_cast<uint32_t>(kConsumerWarps << task.tiling.cluster_log);
    ptx::barrier_init(at.stored, warps);
    ptx::barrier_init(at.read, warps);
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();
}

// Copies the tiles of this CTA into the ring. Lanes 0 to kTileStrips - 1 copy one strip each, the next one the slabs.
__device__ void produce(const PrefillTask& task, const PrefillCta& at, int lane) {
  const tiles::Tiling& t = task.tiling;
  if (lane >= kCopies) return;
  ptx::fence_bulk_loads();
  const bool is_slab = lane == kTileStrips;
  const uint64_t policy = is_slab ? ptx::evict_last() : ptx::evict_first();
  const int bytes = is_slab ? tiles::prefill_slab_bytes(t) : t.tile_bytes;
  uint8_t* slots = at.shared + (is_slab ? 0 : task.smem.ring + lane * bytes);
  const int apart = is_slab ? bytes : kTileStrips * bytes;
  const int last_strip = static_cast<int>(tiles::ceil_div(t.half, tiles::kStrip / 2)) - 1;
  Stage stage;
  for (int i = at.cluster; i < t.turns() * task.row_tiles; i += task.clusters) {
    const int strip = min(i / task.row_tiles * kTileStrips + lane, last_strip);
    const uint8_t* from = is_slab ? task.slabs + static_cast<int64_t>(i % task.row_tiles) * t.tiles * bytes
                                  : task.weights + t.tile_at(strip, 0);
    for (int tile = t.first_tile(at.rank); tile < t.first_tile(at.rank + 1); ++tile) {
      ptx::barrier_wait(at.empty + stage.index, stage.parity ^ 1);
      ptx::bulk_load(slots + stage.index * apart, from + static_cast<int64_t>(tile) * bytes,
                     static_cast<uint32_t>(bytes), at.full + stage.index, policy, 0);
      stage.next(task.smem.stages);
    }
  }
}

// The scale of a group for one row of A, in two parts whose sum it is, and -(128 + zero point): bfloat16 values, twice
// each. Two parts hold every scale that was fp16 or bf16 exactly.
struct GroupPairs {
  uint32_t high, low, offset;
};

__device__ GroupPairs group_pairs(uint32_t group_word) {
  const float scale = tiles::scale_of(group_word);
  const uint32_t high = ptx::bf16_pair(scale, scale);
  const float rest = scale - tiles::low(high);
  return {high, ptx::bf16_pair(rest, rest), (group_word & 15u) * 0x00010001u | 0xc300c300u};
}

// Register i of A: (code - zero) scale, rounded once, like tiles::dequantize8.
__device__ uint32_t dequantize_pair(uint32_t word, int i, const GroupPairs& group) {
  constexpr uint32_t kOnes = 0x3f803f80u;
  const uint32_t code = ptx::bf16_fma(tiles::codes_to_bf16(word, i), kOnes, group.offset);
  return ptx::bf16_fma(code, group.high, ptx::bf16_fma(code, group.low, 0));
}

// A warp's fragments of a tile of int4 weights with groups of 1 << kGroupLog blocks.
template <int kGroupLog>
struct Int4Fragments {
  static constexpr int kBlocks = 4;
  uint32_t codes[2 * kBlocks];
  uint2 groups[kBlocks >> kGroupLog];
  GroupPairs pairs[2];

  __device__ void load(const uint8_t* tile, int f, int lane) {
    const auto* words = reinterpret_cast<const uint32_t*>(tile);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint4 both = *reinterpret_cast<const uint4*>(words + tiles::code_word(2 * block, lane, 0));
      codes[2 * block] = f == 0 ? both.x : both.y;
      codes[2 * block + 1] = f == 0 ? both.z : both.w;
    }
#pragma unroll
    for (int group = 0; group < kBlocks >> kGroupLog; ++group) {
      groups[group] = *reinterpret_cast<const uint2*>(words + tiles::group_words(group, lane) + 2 * f);
    }
  }

  // The registers of both steps of a block; to be called block by block.
  __device__ void set(uint32_t (&a)[2][4], int block) {
    if (block % (1 << kGroupLog) == 0) {
      pairs[0] = group_pairs(groups[block >> kGroupLog].x);
      pairs[1] = group_pairs(groups[block >> kGroupLog].y);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = dequantize_pair(codes[2 * block + i / 4], i % 4, pairs[i % 2]);
  }
};

struct Bf16Fragments {
  static constexpr int kBlocks = 2;
  const uint32_t* words;

  __device__ void load(const uint8_t* tile, int f, int lane) {
    words = reinterpret_cast<const uint32_t*>(tile) + tiles::dense_word(0, lane, f, 0);
  }
  __device__ void set(uint32_t (&a)[2][4], int block) const {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint4 step = *reinterpret_cast<const uint4*>(words + tiles::dense_word(2 * block + odd, 0, 0, 0));
      a[odd][0] = step.x, a[odd][1] = step.y, a[odd][2] = step.z, a[odd][3] = step.w;
    }
  }
};

// Computes the sums of this CTA's inputs for one fragment of a strip and 128 rows. The registers of A of a block are
// set while the products of the block before are in flight.
template <class Fragments>
__device__ void multiply_tiles(const PrefillTask& task, const PrefillCta& at, int warp, int lane, Stage& stage,
                               float (&sums)[4 * kTileRows8]) {
  const tiles::Tiling& t = task.tiling;
  const int strip = warp % kTileStrips, f = warp / kTileStrips, slab_bytes = tiles::prefill_slab_bytes(t);
  const auto release = [&](int index) {
    __syncwarp();
    ptx::barrier_arrive(at.empty + index, lane == 0 && index >= 0);
  };
  uint32_t a[2][2][4];  // [odd block][odd step]
  int before = -1;      // stage of the previous tile, if there is one
  for (int tile = t.first_tile(at.rank); tile < t.first_tile(at.rank + 1); ++tile) {
    ptx::barrier_wait(at.full + stage.index, stage.parity);
    const uint8_t* slab = at.shared + stage.index * slab_bytes;
    Fragments fragments;
    fragments.load(at.shared + task.smem.ring + (stage.index * kTileStrips + strip) * t.tile_bytes, f, lane);
    const uint64_t b = tiles::operand_descriptor(ptx::shared_address(slab));
#pragma unroll
    for (int block = 0; block < Fragments::kBlocks; ++block) {
      fragments.set(a[block % 2], block);
      ptx::wgmma_fence(a[block % 2]);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        ptx::wgmma(sums, a[block % 2][odd], b + tiles::slab_step(2 * block + odd) / 16,
                   before >= 0 || block + odd > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (block == 0) release(before);
    }
    before = stage.index;
    stage.next(task.smem.stages);
  }
  ptx::wgmma_wait_all(sums);
  release(before);
}

// Adds the residual to the rounded product.
__device__ void add_residual(const tiles::Tiling& t, const Outputs& to, int lane, Unit& unit) {
  if (to.residual == nullptr) return;
  const int64_t pair = tiles::pair_of_outputs(unit.strip, lane);
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // [second][row][neighbour]
    const int64_t row = 8 * unit.j + fragment::c_column(lane, i / 2 % 2);
    if (row >= to.rows || i % 2 >= outputs_left(t, pair, i / 4)) continue;
    float& value = unit.value[i / 4][i / 2 % 2][i % 2];
    value = tiles::rounded(value) +
            ll::Bfloat16::widen(to.residual[row * t.n + (i / 4) * t.half + pair + i % 2]);
  }
}

// Adds the sums of the cluster, and stores this CTA's share of the outputs: eight rows of a strip per unit.
__device__ void store_tile(const PrefillTask& task, const PrefillCta& at, int warp, int lane, int first_strip,
                           int row_tile) {
  constexpr int kUnits = kTileStrips * kTileRows8, kAbreast = 2;  // units whose loads are in flight together
  const tiles::Tiling& t = task.tiling;
  const auto* sums = reinterpret_cast<const float4*>(at.shared + task.smem.sums);
  Outputs stores = task.to;
  stores.residual = nullptr;
  const int each = kUnits >> t.cluster_log, step = kConsumerWarps * kAbreast;
  for (int first = warp; first < each; first += step) {
    Unit units[kAbreast];
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) {
      Unit& unit = units[i];
      const int index = at.rank * each + first + i * kConsumerWarps, strip = index / kTileRows8;
      unit.strip = first_strip + strip, unit.j = row_tile * kTileRows8 + index % kTileRows8;
      if (first + i * kConsumerWarps >= each || 8 * unit.j >= task.to.rows) continue;
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        const int at_sums = tiles::partial_at(strip, kTileRows8, index % kTileRows8, f, lane);
        const float4 v = reduce_cluster(sums + at_sums, t.cluster());
        const float four[4] = {v.x, v.y, v.z, v.w};
        set_sums(unit, f, four);
      }
      add_bias(t, task.to, lane, unit);
      add_residual(t, task.to, lane, unit);
    }
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) {
      if (first + i * kConsumerWarps < each && 8 * units[i].j < task.to.rows) store_unit(t, stores, lane, units[i]);
    }
  }
}

template <class Fragments>
__device__ void consume(const PrefillTask& task, const PrefillCta& at, int warp, int lane) {
  const tiles::Tiling& t = task.tiling;
  auto* mine = reinterpret_cast<float4*>(at.shared + task.smem.sums);
  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane < t.cluster()) ptx::remote_arrive(barrier, static_cast<uint32_t>(lane));
  };
  Stage stage;
  uint32_t parity = 0;
  for (int i = at.cluster; i < t.turns() * task.row_tiles; i += task.clusters, parity ^= 1) {
    float sums[4 * kTileRows8];
    multiply_tiles<Fragments>(task, at, warp, lane, stage, sums);
    ptx::cluster_barrier_wait(at.read, parity ^ 1);
#pragma unroll
    for (int j = 0; j < kTileRows8; ++j) {
      mine[tiles::partial_at(warp % kTileStrips, kTileRows8, j, warp / kTileStrips, lane)] = {
          sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
    }
    arrive(at.stored);
    ptx::cluster_barrier_wait(at.stored, parity);
    store_tile(task, at, warp, lane, i / task.row_tiles * kTileStrips, i % task.row_tiles);
    arrive(at.read);
  }
}

template <class Fragments>
__global__ void __launch_bounds__(kProductThreads, 1) prefill_kernel(const __grid_constant__ PrefillTask task) {
  if constexpr (ptx::kWgmma) {
    const PrefillCta at = prefill_cta(task, swizzle_aligned_shared());
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    init_barriers(task, at);
    ptx::launch_dependents();
    ptx::wait_for_dependencies();
    if (warp == kConsumerWarps) {
      produce(task, at, lane);
    } else {
      consume<Fragments>(task, at, warp, lane);
    }
    ptx::cluster_meet();  // no CTA exits while another one reads its sums
  }
}

using Kernel = void (*)(PrefillTask);

Kernel kernel_for(int group) {
  if (group == 0) return prefill_kernel<Bf16Fragments>;
  if (group == 128) return prefill_kernel<Int4Fragments<2>>;
  return group == 64 ? prefill_kernel<Int4Fragments<1>> : prefill_kernel<Int4Fragments<0>>;
}

void pack_slabs(const LinearArgs& a, uint8_t* slabs, Stream stream) {
  PackSlabsTask pack{{}, slabs};
  pack.each.tiling = a.weights->tiling;
  pack.each.x = static_cast<const uint16_t*>(a.x);
  pack.each.norm = static_cast<const uint16_t*>(a.norm);
  pack.each.eps = a.eps;
  pack.each.rows = static_cast<int32_t>(a.rows);
  const auto rows = static_cast<unsigned>(tiles::row_tiles(a.rows) * kTileRows);
  launch("linear", pack_slabs_kernel, {.grid = dim3(rows), .threads = kPackThreads, .early = true}, stream, pack);
}

}  // namespace

void prepare_prefill(const Device& device) {
  if (!tiles::has_prefill_kernel(device)) return;
  for (const int group : {0, 32, 64, 128}) allow_shared_memory("linear", kernel_for(group), device.shared);
}

int64_t prefill_scratch_bytes(const Weights& weights, int64_t rows) {
  if (!tiles::uses_prefill(weights.device, rows)) return 0;
  const tiles::Tiling& t = weights.tiling;
  return static_cast<int64_t>(tiles::row_tiles(rows)) * t.tiles * tiles::prefill_slab_bytes(t);
}

void linear_prefill(const LinearArgs& args, void* scratch, Stream stream) {
  const Weights& w = *args.weights;
  auto* slabs = static_cast<uint8_t*>(scratch);
  pack_slabs(args, slabs, stream);
  const tiles::Tiling t = tiles::prefill_tiling(w.tiling, args.rows, w.device);
  PrefillTask task{t, tiles::prefill_smem_layout(t, w.device), static_cast<const uint8_t*>(w.data), slabs, {},
                   tiles::row_tiles(args.rows), 0};
  task.to = {w.bias, static_cast<const uint16_t*>(args.residual), static_cast<uint16_t*>(args.out), args.logits,
             args.swiglu, static_cast<int32_t>(args.rows)};
  task.clusters = std::min(t.turns() * task.row_tiles, static_cast<int32_t>(w.device.max_clusters[t.cluster_log]));
  const Launch how{.grid = dim3(static_cast<unsigned>(task.clusters * t.cluster())),
                   .threads = kProductThreads,
                   .cluster = t.cluster(),
                   .shared = task.smem.total,
                   .early = true};
  launch("linear", kernel_for(t.group), how, stream, task);
}

}  // namespace swiftspec::cuda
