// Loads of a block: queries and new keys after RoPE, cached keys and values, and those of the rows themselves.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/ieee.h"
#include "common/warp.h"
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

// Eight elements, from `at` on, of a head x [kDim] after RoPE at the position of `row`: x cos + half_rotation(x) sin,
// where `sin` includes the sign of the rotation. Rounds where the reference rounds.
template <int kDim>
SWIFTSPEC_HD Vec8 apply_rope(const AttentionSetup& a, const uint16_t* x, int row, int at) {
  const int64_t table = a.positions[row] * kDim + at;
  const Vec8 straight = *reinterpret_cast<const Vec8*>(x + at);
  const Vec8 turned = *reinterpret_cast<const Vec8*>(x + (at + kDim / 2) % kDim);
  const Vec8 cos = *reinterpret_cast<const Vec8*>(static_cast<const uint16_t*>(a.cos) + table);
  const Vec8 sin = *reinterpret_cast<const Vec8*>(static_cast<const uint16_t*>(a.sin) + table);
  Vec8 out;
  for (int i = 0; i < 8; ++i) {
    const float first = bf16::widen(bf16::nearest(ieee::mul(bf16::widen(straight.x[i]), bf16::widen(cos.x[i]))));
    out.x[i] = bf16::nearest(fmaf(bf16::widen(turned.x[i]), bf16::widen(sin.x[i]), first));
  }
  return out;
}

// Stores eight elements in the type of the cache.
SWIFTSPEC_HD void store_vector(uint16_t* to, const Vec8& chunk) { *reinterpret_cast<Vec8*>(to) = chunk; }
SWIFTSPEC_HD void store_vector(uint8_t* to, const Vec8& chunk) {
  *reinterpret_cast<float8::Vec8*>(to) = float8::nearest(chunk);
}

// Writes the new keys and values of the rows of the group to the cache; the blocks of the first part share the work.
template <class F>
SWIFTSPEC_HD void append_kv(const TileTask<F>& j, int rank, int thread) {
  constexpr int kChunks = F::kDim / 8;
  for (int i = thread; i < ceil_div32(j.group.count - rank, F::kCluster) * kChunks; i += kThreads) {
    const int row = j.group.first + rank + i / kChunks * F::kCluster, at = i % kChunks * 8;
    const int64_t to = j.region() + j.setup.slots[row] * F::kDim + at;
    store_vector(j.keys + to, apply_rope<F::kDim>(j.setup, j.new_key(row), row, at));
    store_vector(j.values + to, *reinterpret_cast<const Vec8*>(j.new_value(row) + at));
  }
}

// Loads the number of keys of each row of the group.
template <class F>
SWIFTSPEC_HD void load_key_counts(const TileTask<F>& j, SharedMemory<F>& s, int thread) {
  if (thread < kColumns) s.key_counts[thread] = thread < j.group.count ? j.setup.count[j.group.first + thread] : 0;
}

template <class F>
SWIFTSPEC_HD void load_queries(const TileTask<F>& j, SharedMemory<F>& s, int thread) {
  constexpr int kChunks = F::kDim / 8;
  for (int i = thread; i < j.column_blocks() * 8 * kChunks; i += kThreads) {
    const int column = i / kChunks, at = i % kChunks * 8;
    Vec8 chunk = {};
    if (column < j.columns()) {
      const int row = j.group.first + column / j.heads(), head = j.head * j.heads() + column % j.heads();
      chunk = apply_rope<F::kDim>(j.setup, j.head_of(row, head), row, at);
    }
    *reinterpret_cast<Vec8*>(&s.queries[column][at]) = chunk;
  }
}

enum class Kind : uint8_t { keys, values };

// Pieces of 16 bytes of the cache, of which a unit of keys or values consists.
template <class F>
struct Pieces {
  static constexpr int kOfKey = F::kDim / F::kVectorElements, kOfUnit = kUnit * kOfKey;
  static constexpr int kNone = INT32_MIN;  // the source of a piece beyond the last key of a row

  SWIFTSPEC_HD static int dimension(int i) { return i % kOfKey * F::kVectorElements; }  // the first of piece i

  // Its place in the stage, in the type of the cache: float8 goes to the second half of the place of its bfloat16.
  SWIFTSPEC_HD static Vec8* place(SharedMemory<F>& s, int slot, int i) {
    const int key = i % kOfUnit / kOfKey, at = dimension(i) + F::kVectorElements - 8;
    return reinterpret_cast<Vec8*>(&s.stage[slot + i / kOfUnit][key][at]);
  }

  // Where piece i of the units from `first` on lies: a slot, ~row for a new key, or kNone. `start`: window_start.
  SWIFTSPEC_HD static int source(const TileTask<F>& j, const SharedMemory<F>& s, int tile, int start, int first,
                                 int i) {
    const Unit unit = unit_at(j, s, first + i / kOfUnit);
    const int number = j.first_key(tile) + unit.index * kUnit + i % kOfUnit / kOfKey;
    if (number >= s.key_counts[unit.row]) return kNone;
    if (number < start) return number;
    return j.setup.tail[(j.group.first + unit.row) * static_cast<int>(j.setup.width) + number - start];
  }
};

// Stores a piece of a new key, after RoPE, or of a new value, rounded as in the cache.
template <class F>
SWIFTSPEC_HD void store_new(const TileTask<F>& j, Kind kind, int row, int dimension, Vec8* to) {
  SWIFTSPEC_UNROLL
  for (int e = 0; e < F::kVectorElements; e += 8) {
    store_vector(reinterpret_cast<typename F::Stored*>(to) + e,
                 kind == Kind::keys ? apply_rope<F::kDim>(j.setup, j.new_key(row), row, dimension + e)
                                    : *reinterpret_cast<const Vec8*>(j.new_value(row) + dimension + e));
  }
}

// Loads units first .. first + count - 1 of a tile into the stage from `slot` on; keys beyond the end of a row are
// zeros. Several entries of the key lists are read before any is used, so that their latencies overlap. New keys have a
// loop of their own, so that the code of RoPE is not unrolled.
template <class F>
SWIFTSPEC_HD void load_units(const TileTask<F>& j, SharedMemory<F>& s, int tile, Kind kind, int first, int count,
                             int slot, int thread) {
  using P = Pieces<F>;
  constexpr int kAbreast = 4;
  const int start = window_start(j.setup, j.sequence()), end = count * P::kOfUnit;
  const typename F::Stored* cache = (kind == Kind::keys ? j.keys : j.values) + j.region();
  SWIFTSPEC_NO_UNROLL
  for (int base = thread; base < end; base += kAbreast * kThreads) {
    int source[kAbreast];
    SWIFTSPEC_UNROLL
    for (int p = 0; p < kAbreast; ++p) {
      source[p] = P::source(j, s, tile, start, first, min32(base + p * kThreads, end - 1));
    }
    uint32_t fresh = 0;
    SWIFTSPEC_UNROLL
    for (int p = 0; p < kAbreast; ++p) {
      const int i = base + p * kThreads;
      if (i >= end) continue;
      if (source[p] >= 0) {
        const int64_t from = static_cast<int64_t>(source[p]) * F::kDim + P::dimension(i);
        copy_async(P::place(s, slot, i), reinterpret_cast<const Vec8*>(cache + from));
      } else if (source[p] == P::kNone) {
        *P::place(s, slot, i) = Vec8{};
      } else {
        fresh |= 1u << p;
      }
    }
    SWIFTSPEC_NO_UNROLL
    for (; fresh != 0; fresh &= fresh - 1) {
      const int i = base + warp::lowest_bit(fresh) * kThreads;
      const int row = ~P::source(j, s, tile, start, first, i);
      store_new(j, kind, row, P::dimension(i), P::place(s, slot, i));
    }
  }
}

// Converts `count` units in the stage, from `slot` on, to bfloat16; each thread converts what it has loaded itself.
template <class F>
SWIFTSPEC_HD void widen_units(SharedMemory<F>& s, int count, int slot, int thread) {
  if constexpr (F::kVectorElements == 16) {
    for (int i = thread; i < count * Pieces<F>::kOfUnit; i += kThreads) {
      Vec8* to = Pieces<F>::place(s, slot, i) - 1;
      const float8::Bf16x16 two = float8::widened(to[1]);
      to[0] = two.x[0];
      to[1] = two.x[1];
    }
  }
}

}  // namespace swiftspec::attention
