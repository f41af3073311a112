// Top-k of logits for k of at most 32, without the launch; for host code and device code. The result is that of
// scan_columns and its reductions (sampling.h), whose cost grows with k: there the entries of a list are inserted one
// after the other, here all lists are sorted by networks.
//
// A warp holds 32 columns per lane. The k-th largest of the lanes' maxima is a lower bound of the k-th largest column, so
// only columns from this bound on are candidates, about 12 of 1,024 for k = 8. They are written to shared memory, 32 at a
// time, sorted, and merged with the sorted list of the columns before. Lists of warps, then of blocks, are merged in
// pairs. The order of entries is total, so the order of merges does not matter; sums are added as in sampling.h.
#pragma once

#include "cuda/sampling/sampling.h"

namespace swiftspec::sampling {

constexpr int kFew = 32;                          // largest k
constexpr int kHeldSpans = 4;                     // spans of a warp whose scores are in registers at the same time
constexpr int kHeld = kHeldSpans * kPrefetch;     // columns per lane
constexpr uint32_t kHeldSpan = kHeldSpans * kClusterSpan;  // columns that a cluster holds
static_assert(kHeld <= 32, "one bit per column");

// One entry per lane.
struct Entries {
  warp::PerLane<float> value;
  warp::PerLane<int32_t> index;
};

// A list: the entry of rank i is that of lane i; ranks without an entry hold -inf and kNoIndex.
SWIFTSPEC_HD Entries no_entries() {
  Entries none;
  SWIFTSPEC_EACH_LANE(lane) {
    none.value(lane) = -INFINITY;
    none.index(lane) = top_k::kNoIndex;
  }
  return none;
}

// Of each two lanes whose numbers differ in the bit `step`, the one for which `first(lane)` keeps the entry that ranks
// before the other.
template <class First>
SWIFTSPEC_HD void compare_exchange(Entries& x, int step, First first) {
  const auto value = warp::shuffle_xor(x.value, step);
  const auto index = warp::shuffle_xor(x.index, step);
  SWIFTSPEC_EACH_LANE(lane) {
    const bool other = top_k::ranks_before(value(lane), index(lane), x.value(lane), x.index(lane));
    x.value(lane) = other == first(lane) ? value(lane) : x.value(lane);
    x.index(lane) = other == first(lane) ? index(lane) : x.index(lane);
  }
}

// Bitonic sort: afterwards x is a list.
SWIFTSPEC_HD void sort(Entries& x) {
  SWIFTSPEC_UNROLL
  for (int size = 2; size <= 32; size *= 2) {
    SWIFTSPEC_UNROLL
    for (int step = size / 2; step > 0; step /= 2) {
      compare_exchange(x, step, [&](int lane) { return ((lane & size) == 0) == ((lane & step) == 0); });
    }
  }
}

// Replaces a list by the best 32 entries of it and of another list: the better one of rank i and rank 31 - i form a
// bitonic sequence.
SWIFTSPEC_HD void merge(Entries& x, const Entries& list) {
  const auto value = warp::shuffle_xor(list.value, 31);
  const auto index = warp::shuffle_xor(list.index, 31);
  SWIFTSPEC_EACH_LANE(lane) {
    const bool other = top_k::ranks_before(value(lane), index(lane), x.value(lane), x.index(lane));
    x.value(lane) = other ? value(lane) : x.value(lane);
    x.index(lane) = other ? index(lane) : x.index(lane);
  }
  SWIFTSPEC_UNROLL
  for (int step = 16; step > 0; step /= 2) {
    compare_exchange(x, step, [&](int lane) { return (lane & step) == 0; });
  }
}

SWIFTSPEC_HD void store(const Entries& x, Entry<float>* to) {
  SWIFTSPEC_EACH_LANE(lane) { to[lane] = {x.value(lane), x.index(lane)}; }
}

// The first `count` entries at `from`; the other lanes have none.
SWIFTSPEC_HD Entries load(const Entry<float>* from, int count = 32) {
  Entries x = no_entries();
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane < count) {
      x.value(lane) = from[lane].value;
      x.index(lane) = from[lane].index;
    }
  }
  return x;
}

// Shared memory of a block. Only that of the first block of a cluster has the results of all blocks.
struct TopFew {
  Entry<float> warps[kWarps][32];  // lists of the warps; before that, candidates
  LogSum warp_sums[kWarps];
  Entry<float> blocks[kBlocks][32];
  LogSum block_sums[kBlocks];
  LogSum sum;
};

// Offset of column i of a lane, in ascending order, from its first one.
SWIFTSPEC_HD constexpr uint32_t held_offset(int i) {
  return static_cast<uint32_t>(i / kPrefetch * kClusterSpan + 32 * (i % kPrefetch));
}

using Held = warp::PerLane<warp::Regs<kHeld, float>>;

// Loads the logits of the columns that a warp holds, of which the first one is `base`; -inf beyond the vocabulary.
SWIFTSPEC_HD void load_held(const ScoreArgs& a, int64_t row, uint32_t base, Held& x) {
  SWIFTSPEC_EACH_LANE(lane) {
    const uint32_t first = base + static_cast<uint32_t>(lane), left = static_cast<uint32_t>(a.vocab) - base;
    const float* logits = a.logits + row * a.stride + first;
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      x(lane).r[i] = static_cast<uint32_t>(lane) + held_offset(i) < left ? logits[held_offset(i)] : -INFINITY;
    }
  }
}

// Turns the logits of a span of one lane, whose first column is `first`, into scores; operations as in `score`.
SWIFTSPEC_HD void make_scores(const ScoreArgs& a, const Scale& scale, int64_t noise_row, uint32_t first, float* x) {
  const auto each = [&](auto work) {
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kPrefetch; ++i) {
      if (first + 32 * i < a.vocab) x[i] = work(x[i], first + 32 * i);
    }
  };
  if (a.bias != nullptr) each([&](float v, uint32_t column) { return ieee::add(v, a.bias[column]); });
  if (scale.temperature != 1.0f) each([&](float v, uint32_t) { return ieee::div(v, scale.temperature); });
  if (!scale.noisy) return;
  const float* noise = a.noise + noise_row * a.vocab;
  each([&](float v, uint32_t column) { return ieee::add(v, noise[column]); });
  if (scale.tau != 1.0f) each([&](float v, uint32_t) { return ieee::div(v, scale.tau); });
}

// Turns the logits that a warp holds into scores. A rolled loop, in which the spans take turns in the first registers:
// unrolled, its code would be most of the kernel's.
SWIFTSPEC_HD void score_held(const ScoreArgs& a, const Scale& scale, int64_t noise_row, uint32_t base, Held& x) {
  if (a.bias == nullptr && scale.temperature == 1.0f && !scale.noisy) return;
  SWIFTSPEC_NO_UNROLL
  for (int s = 0; s < kHeldSpans; ++s, base += kClusterSpan) {
    SWIFTSPEC_EACH_LANE(lane) {
      auto& held = x(lane).r;
      float span[kPrefetch];
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kPrefetch; ++i) span[i] = held[i];
      make_scores(a, scale, noise_row, base + static_cast<uint32_t>(lane), span);
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kHeld - kPrefetch; ++i) held[i] = held[i + kPrefetch];
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kPrefetch; ++i) held[kHeld - kPrefetch + i] = span[i];
    }
  }
}

// Adds the exponentials of the scores to the sum of each lane.
SWIFTSPEC_HD void accumulate_held(const ScoreArgs& a, uint32_t base, const Held& x, warp::PerLane<LogSum>& sum) {
  SWIFTSPEC_UNROLL
  for (int s = 0; s < kHeldSpans; ++s) {
    if (base + held_offset(s * kPrefetch) >= a.vocab) return;
    SWIFTSPEC_EACH_LANE(lane) {
      warp::Regs<kPrefetch, float> span;
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kPrefetch; ++i) span.r[i] = x(lane).r[s * kPrefetch + i];
      accumulate(sum(lane), span);
    }
  }
}

SWIFTSPEC_HD void make_nan_infinite(Held& x) {
  SWIFTSPEC_EACH_LANE(lane) {
    SWIFTSPEC_UNROLL
    for (float& score : x(lane).r) score = score != score ? INFINITY : score;
  }
}

// The first entry of each lane; NaN is ignored.
SWIFTSPEC_HD Entries lane_maxima(const ScoreArgs& a, uint32_t base, const Held& x) {
  Entries first = no_entries();
  SWIFTSPEC_EACH_LANE(lane) {
    float top = x(lane).r[0];
    SWIFTSPEC_UNROLL
    for (int i = 1; i < kHeld; ++i) top = fmaxf(top, x(lane).r[i]);
    int at = kHeld;
    SWIFTSPEC_UNROLL
    for (int i = kHeld - 1; i >= 0; --i) at = x(lane).r[i] == top ? i : at;
    const uint32_t column = base + static_cast<uint32_t>(lane) + held_offset(at);
    if (at < kHeld && column < a.vocab) {
      first.value(lane) = top;
      first.index(lane) = static_cast<int32_t>(column);
    }
  }
  return first;
}

// The columns of each lane, one bit each, that do not rank after the entry (value, index).
SWIFTSPEC_HD warp::PerLane<uint32_t> candidates(const ScoreArgs& a, uint32_t base, const Held& x, float value,
                                                int32_t index) {
  const int64_t last = index < a.vocab ? index : a.vocab - 1;  // of equal scores
  warp::PerLane<uint32_t> bits;
  SWIFTSPEC_EACH_LANE(lane) {
    bits(lane) = 0;
    const auto left = static_cast<int>(last - base - lane);
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const float score = x(lane).r[i];
      const bool found = score > value || (score == value && static_cast<int>(held_offset(i)) <= left);
      bits(lane) |= static_cast<uint32_t>(found) << i;
    }
  }
  return bits;
}

// Sum of the x of the lanes up to each one.
SWIFTSPEC_HD warp::PerLane<int> prefix_sum(warp::PerLane<int> x) {
  SWIFTSPEC_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const auto before = warp::shuffle_up(x, step);
    SWIFTSPEC_EACH_LANE(lane) {
      if (lane >= step) x(lane) += before(lane);
    }
  }
  return x;
}

// Adds the columns that a warp holds to its list of the best. `memory` has place for 32 entries.
SWIFTSPEC_HD void add_held(const ScoreArgs& a, int k, uint32_t base, const Held& x, Entries& best,
                           Entry<float>* memory) {
  Entries bound = lane_maxima(a, base, x);
  sort(bound);
  float value = warp::shuffle(bound.value, k - 1);
  int32_t index = warp::shuffle(bound.index, k - 1);
  const float last = warp::shuffle(best.value, k - 1);
  const int32_t its = warp::shuffle(best.index, k - 1);
  if (top_k::ranks_before(last, its, value, index)) {
    value = last;
    index = its;
  }
  const auto bits = candidates(a, base, x, value, index);
  warp::PerLane<int> count;
  SWIFTSPEC_EACH_LANE(lane) { count(lane) = warp::popcount(bits(lane)); }
  const auto end = prefix_sum(count);
  const int all = warp::shuffle(end, 31);
  SWIFTSPEC_NO_UNROLL
  for (int first = 0; first < all; first += 32) {
    warp::sync();  // no lane reads the entries before
    SWIFTSPEC_EACH_LANE(lane) {
      int at = end(lane) - count(lane) - first;
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if ((bits(lane) >> i & 1) == 0) continue;
        if (at >= 0 && at < 32) memory[at] = {x(lane).r[i], static_cast<int32_t>(base + held_offset(i)) + lane};
        ++at;
      }
    }
    warp::sync();
    Entries some = load(memory, all - first);
    sort(some);
    merge(best, some);
  }
}

// Scans a warp's columns of a row for the top k scores and, if `sums`, their log-sum-exp; otherwise this is a draw, and a
// NaN counts as infinite, so that it is detected.
SWIFTSPEC_HD void scan_few(const ScoreArgs& a, int64_t row, int k, int block, int warp_index, bool sums, TopFew& found) {
  const Scale scale = scale_of(a);
  const int64_t noise_row = scale.noisy ? a.rows_of_noise[row] : 0;
  Entries best = no_entries();
  warp::PerLane<LogSum> sum;
  SWIFTSPEC_EACH_LANE(lane) { sum(lane) = {-INFINITY, 0}; }
  SWIFTSPEC_NO_UNROLL
  for (uint32_t base = (block * kWarps + warp_index) * kWarpSpan; base < a.vocab; base += kHeldSpan) {
    Held x;
    load_held(a, row, base, x);
    score_held(a, scale, noise_row, base, x);
    sums ? accumulate_held(a, base, x, sum) : make_nan_infinite(x);
    add_held(a, k, base, x, best, found.warps[warp_index]);
  }
  warp::sync();
  store(best, found.warps[warp_index]);
  if (sums) sum = all_reduce(sum);
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) found.warp_sums[warp_index] = sum(lane);
  }
}

// A warp's share of a round that merges lists i and i + step, for every multiple i of 2 * step.
SWIFTSPEC_HD void merge_round(Entry<float> (*lists)[32], int step, int warp_index) {
  Entries best = load(lists[warp_index]);
  merge(best, load(lists[warp_index + step]));
  store(best, lists[warp_index]);
}

// The sum of `count` sums, in order.
SWIFTSPEC_HD LogSum add_all(const LogSum* sums, int count) {
  LogSum all = sums[0];
  for (int i = 1; i < count; ++i) all = add(all, sums[i]);
  return all;
}

}  // namespace swiftspec::sampling
