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

constexpr int kConsumerWarps = 8;  // two warpgroups; another warpgroup issues the copies
constexpr int kProductThreads = 32 * (kConsumerWarps + 4);
// Registers of a thread, of which a multiprocessor has 64 Ki: at the start they are distributed evenly.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

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
      ptx::barrier_init(at.full + stage, static_cast<uint32_t>(task.tiling.warps_n()) + 1);
      ptx::barrier_init(at.empty + stage, kConsumerWarps);
    }
    const auto warps = static_cast<uint32_t>(kConsumerWarps << task.tiling.cluster_log);
    ptx::barrier_init(at.stored, warps);
    ptx::barrier_init(at.read, warps);
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();
}

// Copies the tiles of this CTA into the ring. The first lanes copy one strip each, the next one the slabs.
__device__ void produce(const PrefillTask& task, const PrefillCta& at, int lane) {
  const tiles::Tiling& t = task.tiling;
  const int strips = t.warps_n();
  if (lane > strips) return;
  ptx::fence_bulk_loads();
  const bool is_slab = lane == strips;
  const uint64_t policy = is_slab ? ptx::evict_last() : ptx::evict_first();
  const int bytes = is_slab ? tiles::prefill_slab_bytes(t) : t.tile_bytes;
  uint8_t* slots = at.shared + (is_slab ? 0 : task.smem.ring + lane * bytes);
  const int apart = is_slab ? bytes : strips * bytes;
  const int last_strip = static_cast<int>(tiles::ceil_div(t.half, tiles::kStrip / 2)) - 1;
  Stage stage;
  for (int i = at.cluster; i < t.turns() * task.row_tiles; i += task.clusters) {
    const int strip = min(i / task.row_tiles * strips + lane, last_strip);
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

struct ConsumerWarp {
  int index, lane;
  int strip, fragment;  // of the CTA's strips; the first of its fragments
};

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

// The fragments of a warp, kCount per strip, are passed to wgmma in groups of two: both steps of a block of a single
// fragment, or one step of both fragments.
template <int kCount>
struct GroupOf {
  static __device__ constexpr int step(int group, int i) { return kCount == 2 ? group : 2 * group + i; }
  static __device__ constexpr int fragment(int i) { return kCount == 2 ? i : 0; }
};

// A warp's fragments of a tile of int4 weights with quantisation groups of 1 << kGroupLog blocks.
template <int kGroupLog, int kFragments>
struct Int4Fragments {
  static constexpr int kCount = kFragments, kBlocks = 4;
  uint32_t codes[2 * kBlocks][kCount];
  uint32_t groups[kBlocks >> kGroupLog][kCount][2];
  GroupPairs pairs[kCount][2];

  // `f`: the first fragment of the warp.
  __device__ void load(const uint8_t* tile, int f, int lane) {
    const auto* words = reinterpret_cast<const uint32_t*>(tile);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint4 four = *reinterpret_cast<const uint4*>(words + tiles::code_word(2 * block, lane, 0));
      if constexpr (kCount == 2) {
        codes[2 * block][0] = four.x, codes[2 * block][1] = four.y;
        codes[2 * block + 1][0] = four.z, codes[2 * block + 1][1] = four.w;
      } else {
        codes[2 * block][0] = f == 0 ? four.x : four.y, codes[2 * block + 1][0] = f == 0 ? four.z : four.w;
      }
    }
#pragma unroll
    for (int i = 0; i < (kBlocks >> kGroupLog) * kCount; ++i) {
      const uint2 two =
          *reinterpret_cast<const uint2*>(words + tiles::group_words(i / kCount, lane) + 2 * (f + i % kCount));
      groups[i / kCount][i % kCount][0] = two.x, groups[i / kCount][i % kCount][1] = two.y;
    }
  }

  // Sets the registers of a group; to be called group by group.
  __device__ void set(uint32_t (&a)[2][4], int group) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = GroupOf<kCount>::step(group, i), f = GroupOf<kCount>::fragment(i);
      if (step % (2 << kGroupLog) == 0) {
        pairs[f][0] = group_pairs(groups[step >> kGroupLog >> 1][f][0]);
        pairs[f][1] = group_pairs(groups[step >> kGroupLog >> 1][f][1]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) a[i][r] = dequantize_pair(codes[step][f], r, pairs[f][r % 2]);
    }
  }
};

template <int kFragments>
struct Bf16Fragments {
  static constexpr int kCount = kFragments, kBlocks = 2;
  const uint32_t* words;

  __device__ void load(const uint8_t* tile, int f, int lane) {
    words = reinterpret_cast<const uint32_t*>(tile) + tiles::dense_word(0, lane, f, 0);
  }
  __device__ void set(uint32_t (&a)[2][4], int group) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = GroupOf<kCount>::step(group, i), f = GroupOf<kCount>::fragment(i);
      const uint4 four = *reinterpret_cast<const uint4*>(words + tiles::dense_word(step, 0, f, 0));
      a[i][0] = four.x, a[i][1] = four.y, a[i][2] = four.z, a[i][3] = four.w;
    }
  }
};

// Computes the sums of this CTA's inputs for a warp's fragments and 128 rows. The registers of A of a group are set while
// the products of the group before are in flight.
template <class Fragments>
__device__ void multiply_tiles(const PrefillTask& task, const PrefillCta& at, const ConsumerWarp& warp, Stage& stage,
                               float (&sums)[Fragments::kCount][4 * kTileRows8]) {
  constexpr int kCount = Fragments::kCount, kStrips = 4 * kCount, kGroups = Fragments::kBlocks * kCount;
  const tiles::Tiling& t = task.tiling;
  const int slab_bytes = tiles::prefill_slab_bytes(t);
  const auto release = [&](int index) {
    __syncwarp();
    ptx::barrier_arrive(at.empty + index, warp.lane == 0 && index >= 0);
  };
  uint32_t a[2][2][4];  // [odd group][i of GroupOf]
  int before = -1;      // stage of the previous tile, if there is one
  for (int tile = t.first_tile(at.rank); tile < t.first_tile(at.rank + 1); ++tile) {
    ptx::barrier_wait(at.full + stage.index, stage.parity);
    const uint8_t* slab = at.shared + stage.index * slab_bytes;
    Fragments fragments;
    fragments.load(at.shared + task.smem.ring + (stage.index * kStrips + warp.strip) * t.tile_bytes, warp.fragment,
                   warp.lane);
    const uint64_t b = tiles::operand_descriptor(ptx::shared_address(slab));
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      fragments.set(a[group % 2], group);
      ptx::wgmma_fence(a[group % 2]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = GroupOf<kCount>::step(group, i);
        ptx::wgmma(sums[GroupOf<kCount>::fragment(i)], a[group % 2][i], b + tiles::slab_step(step) / 16,
                   before >= 0 || step > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (group == 0) release(before);
    }
    before = stage.index;
    stage.next(task.smem.stages);
  }
#pragma unroll
  for (auto& of_fragment : sums) ptx::wgmma_wait_all(of_fragment);
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
            ll::Bfloat16::widen(to.residual[row * t.n + tiles::output_of_pair(t, pair, i / 4) + i % 2]);
  }
}

constexpr int kAbreast = 2;  // units whose loads are in flight together

// Adds bias and residual to kAbreast units and stores those that have rows.
__device__ void finish_units(const PrefillTask& task, int lane, Unit (&units)[kAbreast]) {
  Outputs stores = task.to;
  stores.residual = nullptr;
#pragma unroll
  for (Unit& unit : units) {
    if (8 * unit.j >= task.to.rows) continue;
    add_bias(task.tiling, task.to, lane, unit);
    add_residual(task.tiling, task.to, lane, unit);
  }
#pragma unroll
  for (const Unit& unit : units) {
    if (8 * unit.j < task.to.rows) store_unit(task.tiling, stores, lane, unit);
  }
}

// Stores the outputs of a warp that has both fragments of its strip.
__device__ void store_strip(const PrefillTask& task, const ConsumerWarp& warp, int strip, int row_tile,
                            const float (&sums)[2][4 * kTileRows8]) {
#pragma unroll
  for (int first = 0; first < kTileRows8; first += kAbreast) {
    Unit units[kAbreast];
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) {
      units[i].strip = strip, units[i].j = row_tile * kTileRows8 + first + i;
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        const float* of = sums[f] + 4 * (first + i);
        const float four[4] = {of[0], of[1], of[2], of[3]};
        set_sums(units[i], f, four);
      }
    }
    finish_units(task, warp.lane, units);
  }
}

// Adds the sums of the cluster, and stores this CTA's share of the outputs: eight rows of a strip per unit.
__device__ void store_share(const PrefillTask& task, const PrefillCta& at, const ConsumerWarp& warp, int first_strip,
                            int row_tile) {
  const tiles::Tiling& t = task.tiling;
  const auto* sums = reinterpret_cast<const float4*>(at.shared + task.smem.sums);
  const int each = t.warps_n() * kTileRows8 >> t.cluster_log;  // a multiple of kAbreast
  for (int first = warp.index * kAbreast; first < each; first += kConsumerWarps * kAbreast) {
    Unit units[kAbreast];
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) {
      const int index = at.rank * each + first + i, strip = index / kTileRows8, j = index % kTileRows8;
      units[i].strip = first_strip + strip, units[i].j = row_tile * kTileRows8 + j;
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        const float4 v =
            reduce_cluster(sums + tiles::partial_at(strip, kTileRows8, j, f, warp.lane), t.cluster());
        const float four[4] = {v.x, v.y, v.z, v.w};
        set_sums(units[i], f, four);
      }
    }
    finish_units(task, warp.lane, units);
  }
}

// Exchanges the sums of a tile with the other CTAs of the cluster and the other warpgroup, which have the other inputs
// and fragments, and stores the outputs.
__device__ void exchange_tile(const PrefillTask& task, const PrefillCta& at, const ConsumerWarp& warp, int first_strip,
                              int row_tile, uint32_t parity, const float (&sums)[4 * kTileRows8]) {
  auto* mine = reinterpret_cast<float4*>(at.shared + task.smem.sums);
  const auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (warp.lane < task.tiling.cluster()) ptx::remote_arrive(barrier, static_cast<uint32_t>(warp.lane));
  };
  ptx::cluster_barrier_wait(at.read, parity ^ 1);
#pragma unroll
  for (int j = 0; j < kTileRows8; ++j) {
    mine[tiles::partial_at(warp.strip, kTileRows8, j, warp.fragment, warp.lane)] = {sums[4 * j], sums[4 * j + 1],
                                                                                  sums[4 * j + 2], sums[4 * j + 3]};
  }
  arrive(at.stored);
  ptx::cluster_barrier_wait(at.stored, parity);
  store_share(task, at, warp, first_strip, row_tile);
  arrive(at.read);
}

template <class Fragments>
__device__ void consume(const PrefillTask& task, const PrefillCta& at, const ConsumerWarp& warp) {
  constexpr int kStrips = 4 * Fragments::kCount;
  Stage stage;
  uint32_t parity = 0;
  for (int i = at.cluster; i < task.tiling.turns() * task.row_tiles; i += task.clusters, parity ^= 1) {
    const int first_strip = i / task.row_tiles * kStrips, row_tile = i % task.row_tiles;
    float sums[Fragments::kCount][4 * kTileRows8];
    multiply_tiles<Fragments>(task, at, warp, stage, sums);
    if constexpr (Fragments::kCount == 2) {
      store_strip(task, warp, first_strip + warp.strip, row_tile, sums);
    } else {
      exchange_tile(task, at, warp, first_strip, row_tile, parity, sums[0]);
    }
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
    if (warp >= kConsumerWarps) {
      ptx::release_registers<kProducerRegisters>();
      if (warp == kConsumerWarps) produce(task, at, lane);
      __syncwarp();
    } else {
      ptx::claim_registers<kConsumerRegisters>();
      if constexpr (Fragments::kCount == 2) {
        consume<Fragments>(task, at, {warp, lane, warp, 0});
      } else {
        consume<Fragments>(task, at, {warp, lane, warp % 4, warp / 4});
      }
    }
    ptx::cluster_meet();  // no CTA exits while another one reads its sums
  }
}

using Kernel = void (*)(PrefillTask);

template <int kFragments>
Kernel kernel_for(int group) {
  if (group == 0) return prefill_kernel<Bf16Fragments<kFragments>>;
  if (group == 128) return prefill_kernel<Int4Fragments<2, kFragments>>;
  return group == 64 ? prefill_kernel<Int4Fragments<1, kFragments>> : prefill_kernel<Int4Fragments<0, kFragments>>;
}

Kernel kernel_for(int group, int strips_log) {
  return strips_log == tiles::kWideLog ? kernel_for<2>(group) : kernel_for<1>(group);
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
  allow_shared_memory("linear", pack_slabs_kernel, 0);  // the same carveout
  for (const int group : {0, 32, 64, 128}) {
    for (const int log : {tiles::kNarrowLog, tiles::kWideLog}) {
      allow_shared_memory("linear", kernel_for(group, log), device.shared);
    }
  }
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
  launch("linear", kernel_for(t.group, t.n_log), how, stream, task);
}

}  // namespace swiftspec::cuda
