// Loads of a block: queries and new keys after RoPE, cached keys and values, and those of the rows themselves.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/ieee.h"
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
SWIFTSPEC_HD Vec8 apply_rope(const AttentionSetup& a, const uint16_t* x, int64_t row, int at) {
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
  for (int i = thread; i < static_cast<int>(ceil_div(j.group.count - rank, F::kCluster)) * kChunks; i += kThreads) {
    const int64_t row = j.group.first + rank + i / kChunks * F::kCluster;
    const int at = i % kChunks * 8;
    const uint16_t* k = j.qkv + row * j.width() + (j.setup.heads + j.head) * F::kDim;
    const uint16_t* v = k + j.setup.kv_heads * F::kDim;
    const int64_t to = j.region() + j.setup.slots[row] * F::kDim + at;
    store_vector(j.keys + to, apply_rope<F::kDim>(j.setup, k, row, at));
    store_vector(j.values + to, *reinterpret_cast<const Vec8*>(v + at));
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
      const int64_t row = j.group.first + column / j.heads();
      const int64_t head = j.head * j.heads() + column % j.heads();
      chunk = apply_rope<F::kDim>(j.setup, j.qkv + row * j.width() + head * F::kDim, row, at);
    }
    *reinterpret_cast<Vec8*>(&s.queries[column][at]) = chunk;
  }
}

enum class Kind : uint8_t { keys, values };

// Loads units first .. first + count - 1 into the stage from `slot` on, in the type of the cache: float8 goes to the
// second half of the place of its bfloat16. Keys beyond the end of a row are zeros; new keys are rounded as in the
// cache.
template <Kind kKind, class F>
SWIFTSPEC_HD void load_units(const TileTask<F>& j, SharedMemory<F>& s, int first, int count, int slot, int thread) {
  constexpr int kPieces = F::kDim / F::kVectorElements, kSize = kUnit * kPieces;
  const AttentionSetup& a = j.setup;
  const int64_t start = window_start(a, j.sequence());
  const typename F::Stored* cache = (kKind == Kind::keys ? j.keys : j.values) + j.region();
  for (int i = thread; i < count * kSize; i += kThreads) {
    const Unit unit = unit_at(j, s, first + i / kSize);
    const int key = i % kSize / kPieces, at = i % kPieces * F::kVectorElements;
    const int64_t number = j.first_key() + unit.index * kUnit + key, row = j.group.first + unit.row;
    auto* to = reinterpret_cast<Vec8*>(&s.stage[slot + i / kSize][key][at + F::kVectorElements - 8]);
    if (number >= s.key_counts[unit.row]) {
      *to = Vec8{};
      continue;
    }
    const int64_t from = number < start ? number : a.tail[row * a.width + number - start];
    if (from >= 0) {
      copy_async(to, reinterpret_cast<const Vec8*>(cache + from * F::kDim + at));
    } else {
      const uint16_t* fresh = j.qkv + ~from * j.width() + (a.heads + j.head) * F::kDim;
      SWIFTSPEC_UNROLL
      for (int e = 0; e < F::kVectorElements; e += 8) {
        store_vector(reinterpret_cast<typename F::Stored*>(to) + e,
            kKind == Kind::keys ? apply_rope<F::kDim>(a, fresh, ~from, at + e)
                                : *reinterpret_cast<const Vec8*>(fresh + a.kv_heads * F::kDim + at + e));
      }
    }
  }
}

// Converts `count` units in the stage, from `slot` on, to bfloat16; each thread converts what it has loaded itself.
template <class F>
SWIFTSPEC_HD void widen_units(SharedMemory<F>& s, int count, int slot, int thread) {
  if constexpr (F::kVectorElements == 16) {
    constexpr int kPieces = F::kDim / 16, kSize = kUnit * kPieces;
    for (int i = thread; i < count * kSize; i += kThreads) {
      auto* to = reinterpret_cast<Vec8*>(&s.stage[slot + i / kSize][i % kSize / kPieces][i % kPieces * 16]);
      const float8::Bf16x16 two = float8::widened(to[1]);
      to[0] = two.x[0];
      to[1] = two.x[1];
    }
  }
}

}  // namespace swiftspec::attention
