// Pipeline of a block over its tile, from queries to the output of the tile. On a CPU its threads and warps run
// sequentially.
#pragma once

#include <cstdint>

#include "cuda/attention/load.h"
#include "cuda/attention/products.h"
#include "cuda/attention/tile.h"

namespace swiftspec::attention {

#ifdef __CUDA_ARCH__
#define SWIFTSPEC_EACH_THREAD(thread) if (const int thread = static_cast<int>(threadIdx.x); true)
#define SWIFTSPEC_EACH_WARP(index) if (const int index = static_cast<int>(threadIdx.x) / 32; true)
#else
#define SWIFTSPEC_EACH_THREAD(thread) for (int thread = 0; thread < kThreads; ++thread)
#define SWIFTSPEC_EACH_WARP(index) for (int index = 0; index < kWarps; ++index)
#endif

SWIFTSPEC_HD void block_sync() {
#ifdef __CUDA_ARCH__
  __syncthreads();
#endif
}

template <class T>
struct PerWarp {
#ifdef __CUDA_ARCH__
  T value;
  SWIFTSPEC_HD T& operator()(int) { return value; }
#else
  T warps[kWarps];
  SWIFTSPEC_HD T& operator()(int index) { return warps[index]; }
#endif
};

template <Kind kKind, class F>
SWIFTSPEC_HD void load(const TileTask<F>& j, SharedMemory<F>& s, int first, int count, int slot) {
  SWIFTSPEC_EACH_THREAD(thread) {
    load_units<kKind>(j, s, first, count, slot, thread);
    commit_copies();
  }
}

// Double buffer of the stage: ids of the tiles that it holds or that are being loaded, or -1. Only tiles whose units
// are all shared are kept. Each has one side of the stage, keys before values, so that the next tile can be prefetched.
struct StageState {
  int64_t current = -1, prefetched = -1;
  int side = 0;  // of `current`; `prefetched` has the other one
};

// Placement of a tile in the stage. fits: all keys and values are in the stage together, from these slots on; otherwise
// units are loaded piecewise. cached: the tile was already there. prefetching: another tile is being loaded after it.
struct TilePlacement {
  bool fits, cached, prefetching;
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
    const int count = static_cast<int>(min64(s.units - first, F::kStage));
    if (!placement.fits) {
      block_sync();
      load<Kind::keys>(j, s, first, count, 0);
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
SWIFTSPEC_HD void accumulate_tile(const TileTask<F>& j, SharedMemory<F>& s, PerWarp<Output<F>>& out,
                                  TilePlacement placement) {
  for (int first = 0; first < s.units; first += F::kStage) {
    const int count = static_cast<int>(min64(s.units - first, F::kStage));
    if (!placement.fits) {
      block_sync();
      load<Kind::values>(j, s, first, count, 0);
    }
    wait_for_tile<0>(placement.prefetching);
    if (!placement.cached) widen(s, count, placement.value_slot);
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { accumulate_values(j, s, out(index), first, count, placement.value_slot, index); }
  }
}

// Loads the keys and then the values of a tile into the stage.
template <class F>
SWIFTSPEC_HD void load_tile(const TileTask<F>& j, SharedMemory<F>& s, int units, int keys, int values) {
  load<Kind::keys>(j, s, 0, units, keys);
  load<Kind::values>(j, s, 0, units, values);
}

// Chooses the place of this tile in the stage and starts loading it. A tile that is in the stage or being prefetched is
// not loaded again: many groups read a shared prefix once, and the tiles of a long prefix are loaded while the tiles
// before them are computed.
template <class F>
SWIFTSPEC_HD TilePlacement place_tile(const TileTask<F>& j, SharedMemory<F>& s, StageState& stage_state) {
  const bool at_once = s.units <= F::kStage / 2, whole = s.shared_units == F::kUnits;
  if (!whole) {
    stage_state = {};
    if (at_once) load_tile(j, s, s.units, 0, F::kStage / 2);
    return {at_once, false, false, 0, at_once ? F::kStage / 2 : 0};
  }
  const bool there = stage_state.current == j.tile_id(j.tile), asked = stage_state.prefetched == j.tile_id(j.tile);
  if (asked) stage_state.side = 1 - stage_state.side;
  const int keys = 2 * F::kUnits * stage_state.side, values = keys + F::kUnits;
  if (!there && !asked) load_tile(j, s, F::kUnits, keys, values);
  stage_state.current = j.tile_id(j.tile);
  stage_state.prefetched = -1;
  return {true, there, false, keys, values};
}

// Prefetches the block's tile `next` if all rows see all of it and of the current tile, and if the stage has two sides.
template <class F>
SWIFTSPEC_HD void prefetch_tile(const TileTask<F>& j, SharedMemory<F>& s, StageState& stage_state, int64_t next,
                                TilePlacement& placement) {
  if constexpr (F::kStageBuffers > 1) {
    if (stage_state.current < 0 || next < 0 || (next + 1) * F::kTile > j.group.base) return;
    TileTask<F> later = j;
    later.tile = next;
    const int keys = 2 * F::kUnits * (1 - stage_state.side);
    load_tile(later, s, F::kUnits, keys, keys + F::kUnits);
    stage_state.prefetched = j.tile_id(next);
    placement.prefetching = true;
  }
}

// Computes the output of the tile from `key_counts` on. `next` is the block's next tile, or -1. `overlapped_work` runs
// while the keys are loaded; it must load the queries.
template <class F, class Work>
SWIFTSPEC_HD void attend(const TileTask<F>& j, SharedMemory<F>& s, StageState& stage_state, int64_t next,
                         Work overlapped_work) {
  SWIFTSPEC_EACH_THREAD(thread) { plan_units(j, s, thread); }
  block_sync();
  TilePlacement placement = place_tile(j, s, stage_state);
  prefetch_tile(j, s, stage_state, next, placement);
  SWIFTSPEC_EACH_THREAD(thread) { overlapped_work(thread); }
  score_tile(j, s, placement);
  block_sync();
  SWIFTSPEC_EACH_WARP(index) { softmax_tile(j, s, index); }
  block_sync();
  PerWarp<Output<F>> out = {};
  accumulate_tile(j, s, out, placement);
  block_sync();
  SWIFTSPEC_EACH_WARP(index) { store_output(j, s, out(index), index); }
}

}  // namespace swiftspec::attention
