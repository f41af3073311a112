// Pipeline of a block over its tiles of a part, from queries to the output over all of them. On a CPU its threads and
// warps run sequentially.
#pragma once

#include <cstdint>

#include "cuda/attention/load.h"
#include "cuda/attention/products.h"
#include "cuda/attention/tile.h"
#include "cuda/stamps.cuh"

namespace swiftspec::attention {

#ifdef __CUDA_ARCH__
#define SWIFTSPEC_EACH_THREAD(thread) if (const int thread = static_cast<int>(threadIdx.x); true)
#define SWIFTSPEC_EACH_WARP(index) if (const int index = static_cast<int>(threadIdx.x) / 32; true)
#else
#define SWIFTSPEC_EACH_THREAD(thread) for (int thread = 0; thread < F::kThreads; ++thread)
#define SWIFTSPEC_EACH_WARP(index) for (int index = 0; index < F::kWarps; ++index)
#endif

SWIFTSPEC_HD void block_sync() {
#ifdef __CUDA_ARCH__
  __syncthreads();
#endif
}

template <class F, class T>
struct PerWarp {
#ifdef __CUDA_ARCH__
  T value;
  SWIFTSPEC_HD T& operator()(int) { return value; }
#else
  T warps[F::kWarps];
  SWIFTSPEC_HD T& operator()(int index) { return warps[index]; }
#endif
};

template <class F>
SWIFTSPEC_HD void load(const TileTask<F>& j, SharedMemory<F>& s, int tile, Kind kind, int first, int count, int slot,
                       int listed) {
  SWIFTSPEC_EACH_THREAD(thread) {
    load_units(j, s, tile, kind, first, count, slot, listed, thread);
    commit_copies();
  }
}

// Prepares the loads of units first .. first + count - 1 of a tile.
template <class F>
SWIFTSPEC_HD void list_tile_slots(const TileTask<F>& j, SharedMemory<F>& s, int first, int count) {
  if (s.units == s.shared_units) return;
  SWIFTSPEC_EACH_THREAD(thread) { list_slots(j, s, first, count, thread); }
  block_sync();
}

// Double buffer of the stage: ids of the tiles that it holds or that are being loaded, or -1. Only tiles whose units
// are all shared are kept. Each has one side of the stage, keys before values, so that the next tile can be prefetched.
struct StageState {
  int current = -1, prefetched = -1;
  int side = 0;  // of `current`; `prefetched` has the other one
};

// Placement of a tile in the stage. fits: all keys and values are in the stage together, from these slots on; otherwise
// units are loaded piecewise. cached: the tile was already there. loads: it has to be loaded now. prefetching: another
// tile is loaded after it.
struct TilePlacement {
  bool fits, cached, loads, prefetching;
  int key_slot, value_slot;
};

// Waits for the keys or the values of a tile; later copies (kLater groups, and those of another tile) may be in flight.
template <int kLater>
SWIFTSPEC_HD void wait_for_tile(bool another) {
  another ? wait_for_copies<kLater + 2>() : wait_for_copies<kLater>();
}

template <class F>
SWIFTSPEC_HD void widen(SharedMemory<F>& s, int count, int slot) {
  SWIFTSPEC_EACH_THREAD(thread) { widen_units(s, count, slot, thread); }
}

template <class F>
SWIFTSPEC_HD void score_tile(const TileTask<F>& j, SharedMemory<F>& s, TilePlacement placement) {
  for (int first = 0; first < s.units; first += F::kStage) {
    const int count = min32(s.units - first, F::kStage);
    if (!placement.fits) {
      block_sync();
      list_tile_slots(j, s, first, count);
      load(j, s, j.tile, Kind::keys, first, count, 0, first);
      wait_for_copies<0>();
    } else {
      wait_for_tile<1>(placement.prefetching);  // for the keys; the values may be in flight
    }
    if (!placement.cached) widen(s, count, placement.key_slot);
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { score_units(j, s, first, count, placement.key_slot, index); }
  }
}

template <class F>
SWIFTSPEC_HD void accumulate_tile(const TileTask<F>& j, SharedMemory<F>& s, PerWarp<F, Output<F>>& out,
                                  TilePlacement placement, bool first_tile) {
  if (!first_tile) {
    SWIFTSPEC_EACH_WARP(index) { rescale_output(s, out(index), index); }
  }
  for (int first = 0; first < s.units; first += F::kStage) {
    const int count = min32(s.units - first, F::kStage);
    if (!placement.fits) {
      block_sync();
      list_tile_slots(j, s, first, count);
      load(j, s, j.tile, Kind::values, first, count, 0, first);
    }
    wait_for_tile<0>(placement.prefetching);
    if (!placement.cached) widen(s, count, placement.value_slot);
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { accumulate_values(j, s, out(index), first, count, placement.value_slot, index); }
  }
}

// Chooses the place of this tile in the stage. A tile that is in the stage or being prefetched is not loaded again:
// many groups read a shared prefix once, and the tiles of a long prefix are loaded while the tiles before them are
// computed.
template <class F>
SWIFTSPEC_HD TilePlacement place_tile(const TileTask<F>& j, const SharedMemory<F>& s, StageState& stage_state) {
  const bool at_once = s.units <= F::kStage / 2, whole = s.shared_units == F::kUnits;
  if (!whole) {
    stage_state = {};
    return {at_once, false, at_once, false, 0, at_once ? F::kStage / 2 : 0};
  }
  const int id = j.tile_id(j.tile);
  const bool there = stage_state.current == id, asked = stage_state.prefetched == id;
  if (asked) stage_state.side = 1 - stage_state.side;
  const int keys = 2 * F::kUnits * stage_state.side;
  stage_state.current = id;
  stage_state.prefetched = -1;
  return {true, there, !there && !asked, false, keys, keys + F::kUnits};
}

// Decides whether the block's tile `next` is prefetched: if all rows see all of it and of the current tile, and if the
// stage has two sides.
template <class F>
SWIFTSPEC_HD void plan_prefetch(const TileTask<F>& j, StageState& stage_state, int next, TilePlacement& placement) {
  if constexpr (F::kStageBuffers > 1) {
    if (stage_state.current < 0 || next < 0 || j.units_within(next, j.group.base) < F::kUnits) return;
    stage_state.prefetched = j.tile_id(next);
    placement.prefetching = true;
  }
}

// Number of leading units of a tile that the previous kernel does not write: all rows see them, and the forward appends
// to none of them. A multiple of the units that the threads load together, so that each thread loads the same units as
// without a wait in between. Requires AttentionSetup::prepared.
template <class F>
SWIFTSPEC_HD int settled_units(const TileTask<F>& j, const SharedMemory<F>& s) {
  const int settled = min32(s.shared_units, j.units_within(j.tile, j.group.appended));
  return j.setup.prepared ? settled - settled % Pieces<F>::kUnitsAtOnce : 0;
}

// Starts the loads of a tile and of the next one, each its keys and then its values. Units that the previous kernel does
// not write are loaded before `await_previous`. One loop, so that the code of a load exists once.
template <class F, class Await>
SWIFTSPEC_HD void start_loads(const TileTask<F>& j, SharedMemory<F>& s, const StageState& stage_state, int next,
                              const TilePlacement& placement, int settled, Await await_previous) {
  const int other_side = 2 * F::kUnits * (1 - stage_state.side);
  SWIFTSPEC_NO_UNROLL
  for (int i = settled > 0 ? 0 : 2; i < (placement.prefetching ? 6 : 4); ++i) {
    if (i == 2) {
      await_previous();
      SWIFTSPEC_STAMP(j.setup, kWaited);
    }
    const bool later = i >= 4, values = i % 2 != 0;
    if (!later && !placement.loads) continue;
    const int first = later || i < 2 ? 0 : settled, end = later ? F::kUnits : i < 2 ? settled : s.units;
    const int slot = later ? other_side + (values ? F::kUnits : 0) : values ? placement.value_slot : placement.key_slot;
    load(j, s, later ? next : j.tile, values ? Kind::values : Kind::keys, first, end - first, slot + first, 0);
  }
}

// The work of a block apart from its tiles. `await_previous` waits for the previous kernel, before anything is read that it
// may have written; `load_queries` runs after it, while the keys of the first tile are loaded.
template <class Await, class Queries>
struct BlockSteps {
  Await await_previous;
  Queries load_queries;
};

// Adds a tile to the output, from `key_counts` on. `next` is the block's next tile, or -1.
template <class F, class Steps>
SWIFTSPEC_HD void attend_tile(const TileTask<F>& j, SharedMemory<F>& s, StageState& stage_state, int next,
                              bool first_tile, PerWarp<F, Output<F>>& out, const Steps& steps) {
  SWIFTSPEC_EACH_THREAD(thread) { plan_units(j, s, thread); }
  block_sync();
  SWIFTSPEC_STAMP(j.setup, kPlanned);
  TilePlacement placement = place_tile(j, s, stage_state);
  plan_prefetch(j, stage_state, next, placement);
  if (placement.loads) list_tile_slots(j, s, 0, s.units);
  const int settled = placement.loads && first_tile ? settled_units(j, s) : 0;
  start_loads(j, s, stage_state, next, placement, settled, steps.await_previous);
  SWIFTSPEC_STAMP(j.setup, kRequested);
  if (first_tile) {
    SWIFTSPEC_EACH_THREAD(thread) { steps.load_queries(thread); }
  }
  SWIFTSPEC_STAMP(j.setup, kQueries);
  score_tile(j, s, placement);
  block_sync();
  SWIFTSPEC_STAMP(j.setup, kScores);
  SWIFTSPEC_EACH_WARP(index) { softmax_tile(j, s, index); }
  block_sync();
  SWIFTSPEC_STAMP(j.setup, kSoftmax);
  accumulate_tile(j, s, out, placement, first_tile);
  SWIFTSPEC_STAMP(j.setup, kValues);
}

// Computes the output of this block's tiles of the part, from `key_counts` on: one tile per turn. Without a tile the
// maxima are -inf.
template <class F, class Steps>
SWIFTSPEC_HD void attend(TileTask<F>& j, SharedMemory<F>& s, StageState& stage_state, int rank, const Steps& steps) {
  SWIFTSPEC_EACH_THREAD(thread) {
    if (thread < kColumns) s.top[thread] = -INFINITY, s.total[thread] = 0;
  }
  const auto tile_of = [&](int turn) {
    const int tile = turn * F::kCluster + rank;
    return j.unit_key(tile, 0) < j.group.keys ? tile : -1;
  };
  PerWarp<F, Output<F>> out = {};
  bool first_tile = true;
  int turn = first_turn<F>(j.part);
  j.tile = tile_of(turn);
  if (j.tile < 0) return;
  while (j.tile >= 0) {
    block_sync();  // `key_counts` are there, and no warp reads the tile before this one
    turn = next_turn<F>(turn, j.setup.most_parts);
    const int next = tile_of(turn);
    attend_tile(j, s, stage_state, next, first_tile, out, steps);
    first_tile = false;
    j.tile = next;
  }
  block_sync();
  SWIFTSPEC_EACH_WARP(index) { store_output(j, s, out(index), index); }
}

}  // namespace swiftspec::attention
