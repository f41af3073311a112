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
  T here;
  SWIFTSPEC_HD T& operator()(int) { return here; }
#else
  T warps[kWarps];
  SWIFTSPEC_HD T& operator()(int index) { return warps[index]; }
#endif
};

template <Kind kKind, class F>
SWIFTSPEC_HD void load(const Job<F>& j, Shared<F>& s, int first, int count, int slot) {
  SWIFTSPEC_EACH_THREAD(thread) {
    load_units<kKind>(j, s, first, count, slot, thread);
    end_fetches();
  }
}

// What lies in a block's stage, or is on its way: names of tiles of which all units are shared, or -1. Such a tile has
// one of two sides of the stage, its keys in front of its values, so that the next one can come meanwhile.
struct Staged {
  int64_t held = -1, coming = -1;
  int side = 0;  // of `held`; `coming` has the other
};

// How a tile comes to the stage: all its keys and values at once, from which slots on, or some units after the other;
// whether it is there already; and whether another one comes behind it.
struct Coming {
  bool at_once, there, another;
  int keys, values;
};

// Waits for a tile's keys, or for its values, while what was asked for after them may be under way.
template <int kLater>
SWIFTSPEC_HD void await_tile(bool another) {
  another ? await_fetches<kLater + 2>() : await_fetches<kLater>();
}

template <class F>
SWIFTSPEC_HD void widen(Shared<F>& s, int count, int slot) {
  SWIFTSPEC_EACH_THREAD(thread) { widen_units(s, count, slot, thread); }
}

template <class F>
SWIFTSPEC_HD void score_tile(const Job<F>& j, Shared<F>& s, Coming how) {
  for (int first = 0; first < s.units; first += F::kStage) {
    const int count = static_cast<int>(least(s.units - first, F::kStage));
    if (!how.at_once) {
      block_sync();
      load<Kind::keys>(j, s, first, count, 0);
      await_fetches<0>();
    } else {
      await_tile<1>(how.another);  // the keys; the values may be under way
    }
    if (!how.there) widen(s, count, how.keys);
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { score(j, s, first, count, how.keys, index); }
  }
}

template <class F>
SWIFTSPEC_HD void gather_tile(const Job<F>& j, Shared<F>& s, PerWarp<Output<F>>& out, Coming how) {
  for (int first = 0; first < s.units; first += F::kStage) {
    const int count = static_cast<int>(least(s.units - first, F::kStage));
    if (!how.at_once) {
      block_sync();
      load<Kind::values>(j, s, first, count, 0);
    }
    await_tile<0>(how.another);
    if (!how.there) widen(s, count, how.values);
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { gather(j, s, out(index), first, count, how.values, index); }
  }
}

// A tile's keys, then its values, to the stage.
template <class F>
SWIFTSPEC_HD void load_tile(const Job<F>& j, Shared<F>& s, int units, int keys, int values) {
  load<Kind::keys>(j, s, 0, units, keys);
  load<Kind::values>(j, s, 0, units, values);
}

// Where the units of this tile come to lie. A tile that lies in the stage, or has been asked for, is not loaded: rows of
// many groups read a shared prefix once, and the tiles of a long one come while those before them are computed.
template <class F>
SWIFTSPEC_HD Coming place(const Job<F>& j, Shared<F>& s, Staged& staged) {
  const bool at_once = s.units <= F::kStage / 2, whole = s.shared_units == F::kUnits;
  if (!whole) {
    staged = {};
    if (at_once) load_tile(j, s, s.units, 0, F::kStage / 2);
    return {at_once, false, false, 0, at_once ? F::kStage / 2 : 0};
  }
  const bool there = staged.held == j.name(j.tile), asked = staged.coming == j.name(j.tile);
  if (asked) staged.side = 1 - staged.side;
  const int keys = 2 * F::kUnits * staged.side, values = keys + F::kUnits;
  if (!there && !asked) load_tile(j, s, F::kUnits, keys, values);
  staged.held = j.name(j.tile);
  staged.coming = -1;
  return {true, there, false, keys, values};
}

// Asks for the block's tile `next`, if all rows see all of it, behind one of which that is true as well. Without the room
// nothing is asked for.
template <class F>
SWIFTSPEC_HD void ask_for(const Job<F>& j, Shared<F>& s, Staged& staged, int64_t next, Coming& how) {
  if constexpr (F::kSides > 1) {
    if (staged.held < 0 || next < 0 || (next + 1) * F::kTile > j.group.base) return;
    Job<F> later = j;
    later.tile = next;
    const int keys = 2 * F::kUnits * (1 - staged.side);
    load_tile(later, s, F::kUnits, keys, keys + F::kUnits);
    staged.coming = j.name(next);
    how.another = true;
  }
}

// From `seen` to the tile's output. `next` is the tile that the block takes after this one, or -1. `meanwhile` is done
// while the keys are under way; then the queries are there.
template <class F, class Meanwhile>
SWIFTSPEC_HD void attend(const Job<F>& j, Shared<F>& s, Staged& staged, int64_t next, Meanwhile meanwhile) {
  SWIFTSPEC_EACH_THREAD(thread) { plan_units(j, s, thread); }
  block_sync();
  Coming how = place(j, s, staged);
  ask_for(j, s, staged, next, how);
  SWIFTSPEC_EACH_THREAD(thread) { meanwhile(thread); }
  score_tile(j, s, how);
  block_sync();
  SWIFTSPEC_EACH_WARP(index) { soften(j, s, index); }
  block_sync();
  PerWarp<Output<F>> out = {};
  gather_tile(j, s, out, how);
  block_sync();
  SWIFTSPEC_EACH_WARP(index) { put_down(j, s, out(index), index); }
}

}  // namespace swiftspec::attention
