// Top-k selection by a warp, for candidates from a vocabulary and leaves of a tree. For host code and device code.
//
// Entries are ordered by descending value, ties by ascending index. The order is total, so the result does not depend
// on the order in which candidates are offered.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/warp.h"

namespace swiftspec::top_k {

constexpr int kMaxK = 64;
constexpr int32_t kNoIndex = INT32_MAX;

template <class T>
struct Entry {
  T value;
  int32_t index;
};

template <class T>
SWIFTSPEC_HD bool ranks_before(T value, int32_t index, T other, int32_t its) {
  return value > other || (value == other && index < its);
}

// The k largest entries so far, sorted: lane i % 32 holds the entry of rank i, in half i / 32. Empty entries hold -inf
// and kNoIndex.
template <class T>
struct TopK {
  warp::PerLane<T> value[2];
  warp::PerLane<int32_t> index[2];
  T last;  // value of the k-th entry
  int32_t last_index;
  int k;

  SWIFTSPEC_HD explicit TopK(int k_) : last(-INFINITY), last_index(kNoIndex), k(k_) {
    SWIFTSPEC_EACH_LANE(lane) {
      for (int half = 0; half < 2; ++half) {
        value[half](lane) = -INFINITY;
        index[half](lane) = kNoIndex;
      }
    }
  }

  // Offers one candidate per lane. NaN is ignored.
  SWIFTSPEC_HD void offer(const warp::PerLane<T>& x, const warp::PerLane<int32_t>& at) {
    warp::PerLane<bool> good;
    SWIFTSPEC_EACH_LANE(lane) { good(lane) = ranks_before(x(lane), at(lane), last, last_index); }
    for (uint32_t word = warp::ballot(good); word != 0; word &= word - 1) {
      const int lane = warp::lowest_bit(word);
      insert(warp::shuffle(x, lane), warp::shuffle(at, lane));
    }
  }

  SWIFTSPEC_HD void insert(T x, int32_t at) {
    if (!ranks_before(x, at, last, last_index)) return;
    int rank = 0;
    for (int half = 0; half < 2; ++half) {
      warp::PerLane<bool> before;
      SWIFTSPEC_EACH_LANE(lane) { before(lane) = ranks_before(value[half](lane), index[half](lane), x, at); }
      rank += warp::popcount(warp::ballot(before));
    }
    shift<1>(x, at, rank);
    shift<0>(x, at, rank);
    last = k > 32 ? warp::shuffle(value[1], k - 33) : warp::shuffle(value[0], k - 1);
    last_index = k > 32 ? warp::shuffle(index[1], k - 33) : warp::shuffle(index[0], k - 1);
  }

  // Inserts a candidate at its rank if that lies in this half; the entries after it move by one.
  template <int kHalf>
  SWIFTSPEC_HD void shift(T x, int32_t at, int rank) {
    auto values = warp::shuffle_up(value[kHalf]);
    auto indices = warp::shuffle_up(index[kHalf]);
    if (kHalf == 1) {
      const T carried = warp::shuffle(value[0], 31);
      const int32_t carried_index = warp::shuffle(index[0], 31);
      SWIFTSPEC_EACH_LANE(lane) {
        if (lane == 0) {
          values(lane) = carried;
          indices(lane) = carried_index;
        }
      }
    }
    SWIFTSPEC_EACH_LANE(lane) {
      const int mine = lane + 32 * kHalf;
      if (mine == rank) {
        value[kHalf](lane) = x;
        index[kHalf](lane) = at;
      } else if (mine > rank) {
        value[kHalf](lane) = values(lane);
        index[kHalf](lane) = indices(lane);
      }
    }
  }

  // Writes the k entries to memory.
  SWIFTSPEC_HD void store(Entry<T>* to) const {
    SWIFTSPEC_EACH_LANE(lane) {
      for (int half = 0; half < 2; ++half) {
        const int mine = lane + 32 * half;
        if (mine < k) to[mine] = {value[half](lane), index[half](lane)};
      }
    }
  }

  // Offers the k entries that another warp has stored.
  SWIFTSPEC_HD void merge(const Entry<T>* from) {
    for (int half = 0; half < 2; ++half) {
      warp::PerLane<T> x;
      warp::PerLane<int32_t> at;
      SWIFTSPEC_EACH_LANE(lane) {
        const int mine = lane + 32 * half;
        x(lane) = mine < k ? from[mine].value : -INFINITY;
        at(lane) = mine < k ? from[mine].index : kNoIndex;
      }
      offer(x, at);
    }
  }
};

}  // namespace swiftspec::top_k
