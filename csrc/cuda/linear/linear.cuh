// Building blocks of a projection in one CTA: the multi-stage shared-memory pipeline of weight tiles (`Ring`), the
// staging of activations with their RMSNorm, and the products. tiles.h defines the layouts.
#pragma once

#include "cuda/linear/lane_epilogue.h"
#include "cuda/linear/tiles.h"
#include "cuda/ptx.cuh"
#include "cuda/stamps.cuh"
#include "kernels_cuda.h"

namespace swiftspec::cuda {

// Kernel arguments of one rank.
struct LinearTask {
  tiles::Tiling tiling;
  tiles::SmemLayout smem;
  const uint8_t* weights;
  const uint16_t* x;     // [rows, k]
  const uint16_t* norm;  // [k], or null
  float eps;
  int32_t rows, clusters;
  Outputs to;
  const uint8_t* next;  // as in Weights
  int64_t next_bytes, next_slice_bytes;  // in all, and per warp
#ifdef SWIFTSPEC_STAMPS
  const uint8_t* touched;  // as in Weights
  int64_t touched_bytes;
  uint64_t* stamps;  // records of this launch, or null
#endif
};

// The task of a launch with this layout and number of clusters, whose `warps` warps prefetch.
inline LinearTask task_of(const LinearArgs& a, const tiles::SmemLayout& smem, int clusters, int64_t warps) {
  const Weights& w = *a.weights;
  const auto rows = static_cast<int32_t>(a.rows);
  const Outputs to{w.bias, static_cast<const uint16_t*>(a.residual), static_cast<uint16_t*>(a.out), a.logits,
                   a.swiglu, rows};
  return {w.tiling,
          smem,
          static_cast<const uint8_t*>(w.data),
          static_cast<const uint16_t*>(a.x),
          static_cast<const uint16_t*>(a.norm),
          a.eps,
          rows,
          clusters,
          to,
          w.next,
          w.next_bytes,
          tiles::slice_bytes(w.next_bytes, warps)
#ifdef SWIFTSPEC_STAMPS
              ,
          w.touched,
          w.touched_bytes,
          nullptr
#endif
  };
}

#ifdef SWIFTSPEC_STAMPS
// The records of a projection's launch of this number of warps, or null.
inline uint64_t* stamp_records(const Weights& w, int64_t warps) {
  const std::string name = "linear " + std::to_string(w.tiling.k) + " x " + std::to_string(w.tiling.n);
  return stamps::Recorder::get().next(name, warps);
}
#endif

// Index of a thread in the launch of a rank.
struct ThreadIndex {
  int cluster, cta, warp, lane;
};

// Multi-stage shared-memory pipeline of weight tiles (the pipeline stages of CUTLASS and Marlin), one per warp, in the
// order of the iterator `order`. Each warp issues its own copies, so warps do not wait for each other.
template <class Tiles>
class Ring {
 public:
  __device__ Ring(const LinearTask& task, const ThreadIndex& at, uint8_t* shared, const Tiles& order)
      : task_(task),
        lane_(at.lane),
        slots_(shared + task.smem.ring + at.warp * task.smem.stages * task.tiling.tile_bytes),
        full_(reinterpret_cast<uint64_t*>(shared + task.smem.barriers) + at.warp * tiles::kMaxStages),
        next_tile_(order) {
    start();
    __syncwarp();
  }

  __device__ const uint8_t* wait() {
#ifdef SWIFTSPEC_STAMPS
    ptx::barrier_wait(full_ + stage_, parity_ & 1);
    if (stage_ == 0 && parity_ == 0) SWIFTSPEC_STAMP(task_, kFirstTile);
#else
    ptx::barrier_wait(full_ + stage_, parity_);
#endif
    return slots_ + stage_ * task_.tiling.tile_bytes;
  }

  // To be called after all lanes have read the tile: refills its stage.
  __device__ void release() {
    __syncwarp();
    if (lane_ < ptx::kLoaders) fetch(stage_);
    if (++stage_ < task_.smem.stages) return;
    stage_ = 0;
    parity_ ^= 1;
#ifdef SWIFTSPEC_STAMPS
    parity_ |= 2;  // the first tile has been read
#endif
  }

 private:
  __device__ void start() {
    if (lane_ == 0) {
      for (int stage = 0; stage < task_.smem.stages; ++stage) ptx::barrier_init(full_ + stage);
      ptx::fence_barrier_init();
    }
    if constexpr (ptx::kLoaders > 1) __syncwarp();
    if (lane_ >= ptx::kLoaders) return;
    policy_ = ptx::evict_first();
    for (int stage = 0; stage < task_.smem.stages; ++stage) fetch(stage);
  }

  __device__ void fetch(int stage) {
    if (next_tile_.done()) return;
    const int bytes = task_.tiling.tile_bytes;
    const uint8_t* from = task_.weights + task_.tiling.tile_at(next_tile_.strip, next_tile_.tile);
    ptx::bulk_load(slots_ + stage * bytes, from, bytes, full_ + stage, policy_, lane_);
    next_tile_.next();
  }

  const LinearTask& task_;
  int lane_;
  uint8_t* slots_;
  uint64_t* full_;
  Tiles next_tile_;
  uint64_t policy_ = 0;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

// Eight values of x; zeros outside of it.
__device__ inline uint4 load_piece(const uint16_t* x, int64_t row, int64_t rows, int64_t input, int64_t k) {
  if (row >= rows || input >= k) return {};
  return *reinterpret_cast<const uint4*>(x + row * k + input);
}

__device__ inline float add_squares(float sum, uint32_t pair) {
  sum = fmaf(tiles::low(pair), tiles::low(pair), sum);
  return fmaf(tiles::high(pair), tiles::high(pair), sum);
}
__device__ inline float add_squares(float sum, const uint4& piece) {
  return add_squares(add_squares(add_squares(add_squares(sum, piece.x), piece.y), piece.z), piece.w);
}

// The RMSNorm weight of this CTA's inputs. No kernel writes it, so it can be read before the previous kernel ends.
struct NormPart {
  const uint16_t* weight;
  uint32_t bytes;
};
__device__ inline NormPart norm_part(const LinearTask& task, int cta) {
  const int64_t begin = static_cast<int64_t>(task.tiling.first_tile(cta)) * task.tiling.tile_k;
  const int64_t end = static_cast<int64_t>(task.tiling.first_tile(cta + 1)) * task.tiling.tile_k;
  const int64_t count = (end < task.tiling.k ? end : task.tiling.k) - begin;
  return {task.norm + begin, count > 0 ? 2 * static_cast<uint32_t>(count) : 0};
}

// Prefetches this CTA's part of the RMSNorm weight to L2. The first warp calls it.
__device__ inline void prefetch_norm(const LinearTask& task, const ThreadIndex& at) {
  const NormPart part = norm_part(task, at.cta);
  if (part.bytes == 0 || at.lane >= ptx::kLoaders) return;
  ptx::prefetch(reinterpret_cast<const uint8_t*>(part.weight), part.bytes, at.lane);
}

// Starts the copy of this CTA's part of the RMSNorm weight to shared memory; await_norm waits for it. If it has no
// place there, it is prefetched to L2.
__device__ inline void fetch_norm(const LinearTask& task, const ThreadIndex& at, uint8_t* shared) {
  if (at.warp > 0) return;
  if (!ptx::kBulk || task.smem.norm_bytes == 0) return prefetch_norm(task, at);
  auto* barrier = reinterpret_cast<uint64_t*>(shared + task.smem.norm_barrier);
  if (at.lane == 0) {
    ptx::barrier_init(barrier);
    ptx::fence_barrier_init();
  }
  if constexpr (ptx::kLoaders > 1) __syncwarp();
  const NormPart part = norm_part(task, at.cta);
  if (part.bytes == 0 || at.lane >= ptx::kLoaders) return;
  // every cluster reads it
  ptx::bulk_load(shared + task.smem.norm, part.weight, part.bytes, barrier, ptx::evict_last(), at.lane);
}

// A barrier of the block must lie between fetch_norm and this.
__device__ inline void await_norm(const LinearTask& task, const ThreadIndex& at, uint8_t* shared) {
  if (!ptx::kBulk || task.smem.norm_bytes == 0 || norm_part(task, at.cta).bytes == 0) return;
  ptx::barrier_wait(reinterpret_cast<uint64_t*>(shared + task.smem.norm_barrier), 0);
}

// Sum of squares of a row over the input range of CTA `cta`, computed by a warp; all lanes receive it. Lane l adds eighths
// l % 4 of the blocks of tiles l / 4, l / 4 + 8, ..., which are those of a warp of direct.cu. The inputs are also stored to
// `raw`, unless it is null, at the places of the B operands.
template <int kRows8>
__device__ float squares_of(const LinearTask& task, int cta, int row, int lane, uint4* raw) {
  const int64_t begin = static_cast<int64_t>(task.tiling.first_tile(cta)) * task.tiling.tile_k;
  const int log = task.tiling.group != 0 ? 2 : 1, range = task.tiling.range(cta);  // a tile has 1 << log blocks
  const int units = (range + 7) / 8 << log;
  constexpr int kAbreast = ptx::kBulk ? 8 : 4;  // loads in flight, as registers allow; zeros beyond the range
  float sum = 0;
  for (int unit = 0; unit < units; unit += kAbreast) {
    uint4 piece[kAbreast];
    int block[kAbreast];  // of the range
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) {
      const int tile = lane / 4 + ((unit + i) >> log << 3);
      block[i] = tile < range ? (tile << log) + ((unit + i) & ((1 << log) - 1)) : -1;
      piece[i] = block[i] < 0 ? uint4{}
                              : load_piece(task.x, row, task.rows, begin + tiles::x_input(block[i], lane), task.tiling.k);
    }
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) {
      if (raw != nullptr && block[i] >= 0) raw[tiles::x_piece_of(4 * block[i] + lane % 4, kRows8, row)] = piece[i];
      sum = add_squares(sum, piece[i]);
    }
  }
  for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  return sum;
}

// The RMSNorm factor of a row with this sum of squares.
__device__ inline float norm_scale(const LinearTask& task, float squares) {
  return __frsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(task.tiling.k)), task.eps));
}

// A barrier of the cluster, after which its earlier writes to shared memory are visible. That of a single block needs
// no fence of the device's memory.
__device__ inline void sync_cluster(const LinearTask& task) {
  if (!ptx::kClusters || task.tiling.cluster_log == 0) return __syncthreads();
  ptx::cluster_sync();
}

// Computes the RMSNorm factor of 8 * kRows8 rows from `first_row` on into shared memory. Each CTA squares its own
// inputs; the sums of the CTAs of the cluster are added in order. `raw`: as in squares_of, for first_row 0.
template <int kRows8>
__device__ void norm_scales(const LinearTask& task, const ThreadIndex& at, int first_row, uint4* raw, uint8_t* shared) {
  auto* squares = reinterpret_cast<float*>(shared + task.smem.squares);
  auto* scales = reinterpret_cast<float*>(shared + task.smem.scales);
  for (int row = at.warp; row < 8 * kRows8; row += tiles::kWarps) {
    const float sum = squares_of<kRows8>(task, at.cta, first_row + row, at.lane, raw);
    if (at.lane == 0) squares[row] = sum;
  }
  sync_cluster(task);
  if (threadIdx.x < 8 * kRows8) {
    float sum = 0;
    for (int cta = 0; cta < task.tiling.cluster(); ++cta) sum += ptx::remote_load(squares + threadIdx.x, cta);
    scales[threadIdx.x] = norm_scale(task, sum);
  }
  __syncthreads();
}

// Loads a quantisation group (bf16: two blocks) of a row's inputs from `first` on, normalises it by `norm`, the weight
// of these inputs, if kNormed, and stores it as B operands in `pieces`; consecutive blocks are `apart` pieces apart.
// kInPlace: the inputs are already there. For int4 it also stores the group's sum over the four lanes of the row.
template <bool kInt4, bool kInPlace, bool kNormed>
__device__ void stage_group(const LinearTask& task, int row, int64_t first, int lane, const float* scale,
                            const uint16_t* norm, uint4* pieces, int apart, float* sum_of_group) {
  constexpr int kMaxBlocks = kInt4 ? 4 : 2;
  const int together = kInt4 ? 1 << task.tiling.group_log : kMaxBlocks;
  uint4 piece[kMaxBlocks];
  float sum = 0;
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    if (b >= together) break;
    piece[b] = kInPlace ? pieces[b * apart]
                        : load_piece(task.x, row, task.rows, first + tiles::x_input(b, lane), task.tiling.k);
  }
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    if (b >= together) break;
    uint32_t words[4] = {piece[b].x, piece[b].y, piece[b].z, piece[b].w};
    if constexpr (kNormed) {
      const uint4 weight = load_piece(norm, 0, 1, tiles::x_input(b, lane), task.tiling.k - first);
      const uint32_t factors[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = tiles::normalised(words[i], *scale, factors[i]);
    }
    sum += tiles::sum8(words);
    if (!kInPlace || kNormed) pieces[b * apart] = {words[0], words[1], words[2], words[3]};
  }
  if (!kInt4) return;
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (lane % 4 == 0) *sum_of_group = sum;
}

// Calls one(block, j) for this warp's units of a chunk of `blocks` blocks: 1 << log blocks of eight rows each.
template <int kRows8, class One>
__device__ void for_each_group(const ThreadIndex& at, int blocks, int log, One one) {
  for (int unit = at.warp; unit < (blocks >> log) * kRows8; unit += tiles::kWarps) {
    one(unit / kRows8 << log, unit % kRows8);
  }
}

// Copies the pieces of x that this thread will stage to their places in shared memory; zeros outside of x. All copies
// are in flight together, so that a chunk takes one trip to L2.
template <int kRows8>
__device__ void copy_activations(const LinearTask& task, const ThreadIndex& at, int64_t first, int blocks, int log,
                                 uint4* pieces) {
  for_each_group<kRows8>(at, blocks, log, [&](int block, int j) {
    const int row = tiles::x_row(j, at.lane);
    for (int b = block; b < block + (1 << log); ++b) {
      const int64_t input = first + tiles::x_input(b, at.lane);
      uint4* to = pieces + tiles::x_piece(b, kRows8, j, at.lane);
      if (row < task.rows && input < task.tiling.k) {
        ptx::cp_async16(to, task.x + row * task.tiling.k + input);
      } else {
        *to = {};
      }
    }
  });
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}

// Stages a chunk of x in shared memory. A warp processes a group of blocks and eight rows at a time. `first` is the
// first input of the chunk. `in_place`: norm_scales has stored x there; never on GPUs without bulk copies.
template <bool kInt4, int kRows8, bool kNormed>
__device__ void stage_activations(const LinearTask& task, const ThreadIndex& at, int64_t first, int blocks,
                                  bool in_place, uint8_t* shared) {
  auto* pieces = reinterpret_cast<uint4*>(shared + task.smem.x);
  auto* sums = reinterpret_cast<float*>(shared + task.smem.sums);
  const auto* scales = reinterpret_cast<const float*>(shared + task.smem.scales);
  const int64_t begin = static_cast<int64_t>(task.tiling.first_tile(at.cta)) * task.tiling.tile_k;
  const uint16_t* norm = !ptx::kBulk || task.smem.norm_bytes == 0
                             ? task.norm + first
                             : reinterpret_cast<const uint16_t*>(shared + task.smem.norm) + (first - begin);
  const int log = kInt4 ? task.tiling.group_log : 1;
  constexpr bool kCopies = ptx::kBulk;  // on Ampere the registers are too few
  if (kCopies && !in_place) copy_activations<kRows8>(task, at, first, blocks, log, pieces);
  if (kCopies && !kInt4 && !kNormed) return;
  for_each_group<kRows8>(at, blocks, log, [&](int block, int j) {
    const int row = tiles::x_row(j, at.lane);
    stage_group<kInt4, kCopies, kNormed>(
        task, row, first + static_cast<int64_t>(block) * tiles::kBlock, at.lane, scales + row,
        norm + block * tiles::kBlock, pieces + tiles::x_piece(block, kRows8, j, at.lane), kRows8 * 32,
        sums + (block >> log) * 8 * kRows8 + row);
  });
}

template <int kRows8>
using Sums = float[2][kRows8][4];  // [fragment][eight rows][register]

template <int kRows8>
__device__ void clear(Sums<kRows8>& sums) {
#pragma unroll
  for (int i = 0; i < 8 * kRows8; ++i) sums[i / 4 / kRows8][i / 4 % kRows8][i % 4] = 0;
}

// The inputs of a tile in shared memory, as stage_activations has stored them.
template <int kRows8>
struct StagedInputs {
  const uint4* pieces;  // of the tile's first block
  const float* sums;    // of its first group
  int lane;

  __device__ uint4 piece(int block, int j) const { return pieces[tiles::x_piece(block, kRows8, j, lane)]; }
  // The sums of the inputs of a group, which ends with `block`, for the two rows of the lane's sums.
  __device__ float2 group_sums(int group, [[maybe_unused]] int block, int j) const {
    const float* from = sums + (group * kRows8 + j) * 8 + fragment::c_column(lane, 0);
    return *reinterpret_cast<const float2*>(from);
  }
};

// Adds the products of the quantisation group that ends with `block` to the sums and clears them.
template <int kRows8, class Inputs>
__device__ void fold_group(Sums<kRows8>& sums, Sums<kRows8>& products, const uint32_t* words, const Inputs& x,
                           int group_index, int block) {
  const uint4 four = *reinterpret_cast<const uint4*>(words);
  const uint32_t group[2][2] = {{four.x, four.y}, {four.z, four.w}};  // [fragment][upper half]
#pragma unroll
  for (int j = 0; j < kRows8; ++j) {
    const float2 x_sum = x.group_sums(group_index, block, j);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = i % 2 == 0 ? x_sum.x : x_sum.y;
        sums[f][j][i] = tiles::fold(sums[f][j][i], products[f][j][i], group[f][i / 2], x);
      }
    }
  }
  clear<kRows8>(products);
}

// Multiplies an int4 tile with groups of 1 << group_log blocks.
template <int kRows8, class Inputs>
__device__ void multiply_groups(Sums<kRows8>& sums, const uint8_t* tile, const Inputs& x, int group_log, int lane) {
  const auto* words = reinterpret_cast<const uint32_t*>(tile);
  Sums<kRows8> products;
  clear<kRows8>(products);
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const uint4 codes = *reinterpret_cast<const uint4*>(words + tiles::code_word(2 * block, lane, 0));
    const uint32_t word[2][2] = {{codes.x, codes.y}, {codes.z, codes.w}};  // [odd step][fragment]
    uint4 b[kRows8];
#pragma unroll
    for (int j = 0; j < kRows8; ++j) b[j] = x.piece(block, j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = word[i / 2][i % 2];
      const uint32_t a0 = tiles::codes_to_bf16(code, 0), a1 = tiles::codes_to_bf16(code, 1),
                     a2 = tiles::codes_to_bf16(code, 2), a3 = tiles::codes_to_bf16(code, 3);
#pragma unroll
      for (int j = 0; j < kRows8; ++j) {
        ptx::mma(products[i % 2][j], a0, a1, a2, a3, i < 2 ? b[j].x : b[j].z, i < 2 ? b[j].y : b[j].w);
      }
    }
    const int done = block >> group_log;
    if ((block + 1) >> group_log == done) continue;  // the group continues in the next block
    fold_group<kRows8>(sums, products, words + tiles::group_words(done, lane), x, done, block);
  }
}

// Specialises the usual case that a group is a whole tile, which needs no branch between its blocks.
template <int kRows8, class Inputs>
__device__ void multiply_int4(Sums<kRows8>& sums, const uint8_t* tile, const Inputs& x, int group_log, int lane) {
  if (group_log == 2) return multiply_groups<kRows8>(sums, tile, x, 2, lane);
  multiply_groups<kRows8>(sums, tile, x, group_log, lane);
}

template <int kRows8>
__device__ void multiply_bf16(Sums<kRows8>& sums, const uint8_t* tile, const uint4* pieces, int lane) {
  const auto* words = reinterpret_cast<const uint32_t*>(tile);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      const uint4 a = *reinterpret_cast<const uint4*>(words + tiles::dense_word(step, lane, f, 0));
#pragma unroll
      for (int j = 0; j < kRows8; ++j) {
        const uint4 b = pieces[tiles::x_piece(step / 2, kRows8, j, lane)];
        ptx::mma(sums[f][j], a.x, a.y, a.z, a.w, step % 2 == 0 ? b.x : b.z, step % 2 == 0 ? b.y : b.w);
      }
    }
  }
}

// Prefetches this warp's slice of the first tiles of the next projection to L2; `warp` is the index over all CTAs.
__device__ inline void prefetch_tiles(const LinearTask& task, int warp, int lane) {
  if (lane >= ptx::kLoaders) return;
  const tiles::Slice mine = tiles::slice_of(task.next_bytes, task.next_slice_bytes, warp);
  if (mine.bytes > 0) ptx::prefetch(task.next + mine.first, static_cast<uint32_t>(mine.bytes), lane);
}

// Multiplies this warp's tiles of a chunk of `tile_count` tiles, whose inputs are in shared memory. kWhole: int4 groups
// are whole tiles, the usual case, which needs no branch between the blocks of a tile.
template <bool kInt4, int kRows8, bool kWhole>
__device__ void multiply_chunk(const LinearTask& task, const ThreadIndex& at, int tile_count, const uint8_t* shared,
                               Ring<tiles::TileIterator>& ring, Sums<kRows8>& sums) {
  const auto* pieces = reinterpret_cast<const uint4*>(shared + task.smem.x);
  const auto* x_sums = reinterpret_cast<const float*>(shared + task.smem.sums);
  const int blocks = task.tiling.tile_k / tiles::kBlock;
  for (int tile = task.tiling.share_of(at.warp); tile < tile_count; tile += task.tiling.warps_k()) {
    const uint8_t* weights = ring.wait();
    const uint4* mine = pieces + tiles::x_piece(tile * blocks, kRows8, 0, 0);
    if constexpr (kInt4) {
      const float* my_sums = x_sums + tile * task.tiling.groups() * 8 * kRows8;
      const StagedInputs<kRows8> x{mine, my_sums, at.lane};
      multiply_groups<kRows8>(sums, weights, x, kWhole ? 2 : task.tiling.group_log, at.lane);
    } else {
      multiply_bf16<kRows8>(sums, weights, mine, at.lane);
    }
    ring.release();
  }
}

}  // namespace swiftspec::cuda
