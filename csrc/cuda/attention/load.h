// Loads of a block: queries, keys and values.
#pragma once

#include <cstdint>

#include "common/bfloat16.h"
#include "cuda/attention/tile.h"
#include "cuda/float8.h"

#ifdef __CUDA_ARCH__
#include "cuda/ptx.cuh"
#endif

namespace swiftspec::attention {

using bf16::Vec8;

// Starts a 16-byte copy from global to shared memory; `wait_for_copies` waits for it.
SWIFTSPEC_HD void copy_async(Vec8* shared, const Vec8* global) {
#ifdef __CUDA_ARCH__
  ptx::cp_async16(shared, global);
#else
  *shared = *global;
#endif
}

// Commits a group of copies. `wait_for_copies<N>` waits until at most N groups of this thread are in flight.
SWIFTSPEC_HD void commit_copies() {
#ifdef __CUDA_ARCH__
  ptx::cp_async_commit();
#endif
}
template <int N>
SWIFTSPEC_HD void wait_for_copies() {
#ifdef __CUDA_ARCH__
  ptx::cp_async_wait<N>();
#endif
}

SWIFTSPEC_HD RowGroup load_group(const RowGroup* p) {
#ifdef __CUDA_ARCH__
  union {
    int4 words[2];
    RowGroup group;
  } both;
  static_assert(sizeof both == sizeof(RowGroup));
  both.words[0] = __ldcg(reinterpret_cast<const int4*>(p));
  both.words[1] = __ldcg(reinterpret_cast<const int4*>(p) + 1);
  return both.group;
#else
  return *p;
#endif
}

// Loads the number of keys of each column's row.
template <class F>
SWIFTSPEC_HD void load_key_counts(const TileTask<F>& j, SharedMemory<F>& s, int thread) {
  if (thread >= kColumns) return;
  s.key_counts[thread] =
      thread < j.columns() ? load_uncached(j.setup.count + j.group.first + thread / j.heads()) : 0;
}

template <class F>
SWIFTSPEC_HD void load_queries(const TileTask<F>& j, SharedMemory<F>& s, int thread) {
  constexpr int kChunks = F::kDim / 8;
  for (int i = thread; i < j.column_blocks() * 8 * kChunks; i += F::kThreads) {
    const int column = i / kChunks, at = i % kChunks * 8;
    const Vec8 chunk = column < j.columns() ? *reinterpret_cast<const Vec8*>(j.query(column) + at) : Vec8{};
    *reinterpret_cast<Vec8*>(&s.queries[column][at]) = chunk;
  }
}

enum class Kind : uint8_t { keys, values };

// Pieces of 16 bytes of the cache, of which a unit of keys or values consists. A thread loads the same piece of several
// units.
template <class F>
struct Pieces {
  static constexpr int kOfKey = F::kDim / F::kVectorElements, kOfUnit = kUnit * kOfKey;
  static constexpr int kUnitsAtOnce = F::kThreads / kOfUnit;  // that the threads of a block load together

  // Its place in the stage, in the type of the cache: float8 goes to the second half of the place of its bfloat16.
  SWIFTSPEC_HD static Vec8* place(SharedMemory<F>& s, int slot, int piece) {
    const int at = piece % kOfKey * F::kVectorElements + F::kVectorElements - 8;
    return reinterpret_cast<Vec8*>(&s.stage[slot][piece / kOfKey][at]);
  }
};

// The slot of key `number` of a row of the group, or -1 if the row has no such key.
template <class F>
SWIFTSPEC_HD int slot_of_key(const TileTask<F>& j, const SharedMemory<F>& s, int row, int number) {
  if (number >= s.key_counts[row * j.heads()]) return -1;
  if (number < j.group.window) return number;
  const int line = (j.group.first + row) * static_cast<int>(j.setup.width);
  return load_uncached(j.setup.tail + line + number - j.group.window);
}

// Writes the slots of the keys of units first .. first + count - 1 to shared memory, unless they are shared: once for
// keys and values, and all in one trip to L2.
template <class F>
SWIFTSPEC_HD void list_slots(const TileTask<F>& j, SharedMemory<F>& s, int first, int count, int thread) {
  const int begin = max32(s.shared_units - first, 0);
  for (int i = begin * kUnit + thread; i < count * kUnit; i += F::kThreads) {
    const Unit unit = unit_at(j, s, first + i / kUnit);
    s.slots[i / kUnit][i % kUnit] = slot_of_key(j, s, unit.row, j.unit_key(j.tile, unit.index) + i % kUnit);
  }
}

// Loads units first .. first + count - 1 of a tile into the stage from `slot` on; keys beyond the end of a row are
// zeros. The keys of a shared unit lie one after the other; those of others lie in `slots`, from unit `listed` on.
template <class F>
SWIFTSPEC_HD void load_units(const TileTask<F>& j, SharedMemory<F>& s, int tile, Kind kind, int first, int count,
                             int slot, int listed, int thread) {
  using P = Pieces<F>;
  constexpr int kStep = P::kUnitsAtOnce * F::kCluster * kUnit * F::kDim;  // elements between a thread's shared units
  const int piece = thread % P::kOfUnit, key = piece / P::kOfKey;
  const typename F::Stored* cache =
      (kind == Kind::keys ? j.keys : j.values) + j.region() + piece % P::kOfKey * F::kVectorElements;
  const int shared = min32(s.shared_units - first, count);
  int begin = thread / P::kOfUnit;
  const typename F::Stored* from = cache + static_cast<int64_t>(j.unit_key(tile, first + begin) + key) * F::kDim;
  SWIFTSPEC_UNROLL_BY(2)
  for (; begin < shared; begin += P::kUnitsAtOnce) {
    copy_async(P::place(s, slot + begin, piece), reinterpret_cast<const Vec8*>(from));
    from += kStep;
  }
  SWIFTSPEC_UNROLL_BY(4)
  for (; begin < count; begin += P::kUnitsAtOnce) {
    const int source = s.slots[first + begin - listed][key];
    Vec8* to = P::place(s, slot + begin, piece);
    if (source >= 0) {
      copy_async(to, reinterpret_cast<const Vec8*>(cache + static_cast<int64_t>(source) * F::kDim));
    } else {
      *to = Vec8{};
    }
  }
}

// Converts `count` units in the stage, from `slot` on, to bfloat16; each thread converts what it has loaded itself.
template <class F>
SWIFTSPEC_HD void widen_units(SharedMemory<F>& s, int count, int slot, int thread) {
  if constexpr (F::kVectorElements == 16) {
    using P = Pieces<F>;
    for (int i = thread / P::kOfUnit; i < count; i += P::kUnitsAtOnce) {
      Vec8* to = P::place(s, slot + i, thread % P::kOfUnit) - 1;
      const float8::Bf16x16 two = float8::widened(to[1]);
      to[0] = two.x[0];
      to[1] = two.x[1];
    }
  }
}

}  // namespace swiftspec::attention
