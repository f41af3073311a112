// A block's way through its tile, from queries to the tile's output. On a CPU its threads and warps take turns.
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

// What lies in a block's stage, or is on its way: names of tiles of which all units are shared, or -1. Such a tile has
// one of two sides of the stage, its keys in front of its values, so that the next one can come overlapped_work.
struct StageState {
  int64_t current = -1, prefetched = -1;
  int side = 0;  // of `held`; `coming` has the other
};

// How a tile comes to the stage: all its keys and values at once, from which slots on, or some units after the other;
// whether it is there already; and whether another one comes behind it.
struct TilePlacement {
  bool fits, cached, prefetching;
  int key_slot, value_slot;
};

// Waits for a tile's keys, or for its values, while what was asked for after them may be under way.
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
      wait_for_tile<1>(placement.prefetching);  // the keys; the values may be under way
    }
    if (!placement.cached) widen(s, count, placement.key_slot);
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { score_units(j, s, first, count, placement.key_slot, index); }
  }
}

template <class F>
SWIFTSPEC_HD void accumulate_tile(const TileTask<F>& j, SharedMemory<F>& s, PerWarp<Output<F>>& out, TilePlacement placement) {
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

// A tile's keys, then its values, to the stage.
template <class F>
SWIFTSPEC_HD void load_tile(const TileTask<F>& j, SharedMemory<F>& s, int units, int keys, int values) {
  load<Kind::keys>(j, s, 0, units, keys);
  load<Kind::values>(j, s, 0, units, values);
}

// Where the units of this tile come to lie. A tile that lies in the stage, or has been asked for, is not loaded: rows of
// many groups read a shared prefix once, and the tiles of a long one come while those before them are computed.
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

// Asks for the block's tile `next`, if all rows see all of it, behind one of which that is true as well. Without the room
// nothing is asked for.
template <class F>
SWIFTSPEC_HD void prefetch_tile(const TileTask<F>& j, SharedMemory<F>& s, StageState& stage_state, int64_t next, TilePlacement& placement) {
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

// From `key_counts` to the tile's output. `next` is the tile that the block takes after this one, or -1. `overlapped_work` is done
// while the keys are under way; then the queries are there.
template <class F, class Work>
SWIFTSPEC_HD void attend(const TileTask<F>& j, SharedMemory<F>& s, StageState& stage_state, int64_t next, Work overlapped_work) {
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
