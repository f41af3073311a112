// Row groups and the key list of each row, computed once per forward.
#pragma once

#include <cstdint>

#include "common/warp.h"
#include "cuda/attention/sizes.h"
#include "kernels_cuda.h"

namespace swiftspec::attention {

using cuda::AttentionSetup;
using cuda::RowGroup;

// Loads what another kernel or other blocks have written, bypassing L1. What is read before the wait for the previous
// kernel must be loaded so: only the wait makes sure that L1 has no older line of it.
template <class T>
SWIFTSPEC_HD T load_uncached(const T* p) {
#ifdef __CUDA_ARCH__
  return __ldcg(p);
#else
  return *p;
#endif
}

SWIFTSPEC_HD int64_t sequence_of(const AttentionSetup& a, int64_t row) {
  return a.sequence == nullptr ? 0 : load_uncached(a.sequence + row);
}

// The first slot of the mask's window. Column 0 of the mask is this slot, or lies before slot 0 if the mask is wider
// than the sequence.
SWIFTSPEC_HD int window_start(const AttentionSetup& a, int64_t sequence) {
  return static_cast<int>(max64(a.kv_len[sequence] - a.width, 0));
}

// Size of the table of groups. With one sequence every entry is a group. With several sequences there is an entry per
// row, since a group ends where the sequence changes; entries at which no group begins are empty.
SWIFTSPEC_HD int group_table_size(const AttentionSetup& a) {
  const auto rows = static_cast<int>(a.rows);
  return a.sequence == nullptr ? ceil_div32(rows, a.group_rows) : rows;
}

// The rows of entry `i`; count is 0 if no group begins there.
SWIFTSPEC_HD RowGroup group_rows_at(const AttentionSetup& a, int i) {
  const int full = a.group_rows, rows = static_cast<int>(a.rows);
  if (a.sequence == nullptr) return {i * full, min32(full, rows - i * full), 0, 0, 0, 0, {}};
  int start = i, count = 1;
  while (start > 0 && a.sequence[start - 1] == a.sequence[i]) --start;
  if ((i - start) % full != 0) return {i, 0, 0, 0, 0, 0, {}};
  while (count < full && i + count < rows && a.sequence[i + count] == a.sequence[i]) ++count;
  return {i, count, 0, 0, 0, 0, {}};
}

// The slot that the forward writes for `row`, if the row belongs to `sequence`; otherwise no slot.
SWIFTSPEC_HD int appended_slot(const AttentionSetup& a, int row, int64_t sequence) {
  return sequence_of(a, row) == sequence ? static_cast<int>(load_uncached(a.slots + row)) : INT32_MAX;
}

// A warp lists the slots that a row sees in its window. Returns the number of leading slots of the sequence that the
// row sees without a gap. Several groups of 32 mask columns are read at a time, so that latencies overlap.
SWIFTSPEC_HD int list_keys(const AttentionSetup& a, int row) {
  constexpr int kUnrolled = 4;
  const int64_t sequence = sequence_of(a, row);
  const int width = static_cast<int>(a.width), start = window_start(a, sequence);
  const int before = static_cast<int>(a.kv_len[sequence]) - width;  // if negative, the first columns lie before slot 0
  const int first = start - before;
  int seen = 0, run = width - first;
  for (int base = first; base < width; base += 32 * kUnrolled) {
    warp::PerLane<bool> visible[kUnrolled];
    SWIFTSPEC_UNROLL
    for (int c = 0; c < kUnrolled; ++c) {
      SWIFTSPEC_EACH_LANE(lane) {
        const int column = base + 32 * c + lane;
        visible[c](lane) = column < width && a.mask[row * width + column] != 0;
      }
    }
    SWIFTSPEC_UNROLL
    for (int c = 0; c < kUnrolled; ++c) {
      const int from = base + 32 * c;
      const uint32_t word = warp::ballot(visible[c]);
      if (~word != 0) run = min32(run, from - first + warp::lowest_bit(~word));
      SWIFTSPEC_EACH_LANE(lane) {
        if (visible[c](lane)) {
          a.tail[row * width + seen + warp::popcount(word & ((1u << lane) - 1))] = before + from + lane;
        }
      }
      seen += warp::popcount(word);
    }
  }
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) a.count[row] = start + seen;
  }
  return start + run;
}

}  // namespace swiftspec::attention
