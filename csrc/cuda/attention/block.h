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

// How a tile comes to the stage: all its keys and values at once, or some units after the other; and whether it is
// there already.
struct Coming {
  bool at_once, there;
};

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
      await_fetches<1>();  // the keys; the values may be under way
    }
    if (!how.there) widen(s, count, 0);
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { score(j, s, first, count, index); }
  }
}

template <class F>
SWIFTSPEC_HD void gather_tile(const Job<F>& j, Shared<F>& s, PerWarp<Output<F>>& out, Coming how) {
  const int slot = how.at_once ? F::kStage / 2 : 0;
  for (int first = 0; first < s.units; first += F::kStage) {
    const int count = static_cast<int>(least(s.units - first, F::kStage));
    if (!how.at_once) {
      block_sync();
      load<Kind::values>(j, s, first, count, 0);
    }
    await_fetches<0>();
    if (!how.there) widen(s, count, slot);
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { gather(j, s, out(index), first, count, slot, index); }
  }
}

// From `seen` to the tile's output. `held` is the tile of which all keys and values lie in the stage, or -1: rows of
// many groups then read a shared prefix once. `meanwhile` is done while the keys are under way; then the queries are
// there.
template <class F, class Meanwhile>
SWIFTSPEC_HD void attend(const Job<F>& j, Shared<F>& s, int64_t& held, Meanwhile meanwhile) {
  SWIFTSPEC_EACH_THREAD(thread) { plan_units(j, s, thread); }
  block_sync();
  const bool at_once = s.units <= F::kStage / 2, whole = s.shared_units == F::kUnits;
  const int64_t name = j.sequence() * parts(j.setup.capacity, F::kTile) + j.tile;
  const Coming how{at_once, at_once && whole && held == name};
  if (at_once && !how.there) {
    load<Kind::keys>(j, s, 0, s.units, 0);
    load<Kind::values>(j, s, 0, s.units, F::kStage / 2);
  }
  held = whole ? name : -1;
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
