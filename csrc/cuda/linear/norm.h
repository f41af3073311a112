// RMSNorm of a row on a GPU, where no projection does it: all but the launch; host code too. A block takes a row.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"

namespace swiftspec::norm {

using bf16::Chunk;

constexpr int kThreads = 256;

// The sum of squares of a thread's elements of a row.
SWIFTSPEC_HD float squares(const uint16_t* row, int64_t dim, int thread) {
  float sum = 0;
  for (int64_t at = thread * 8; at < dim; at += kThreads * 8) {
    const Chunk chunk = *reinterpret_cast<const Chunk*>(row + at);
    for (int i = 0; i < 8; ++i) sum = fmaf(bf16::widen(chunk.x[i]), bf16::widen(chunk.x[i]), sum);
  }
  return sum;
}

// The thread's elements, rounded before the weight is applied and after; `scale` is 1 / sqrt(mean square + eps).
SWIFTSPEC_HD void normalise(const uint16_t* row, const uint16_t* weight, float scale, int64_t dim, int thread,
                            uint16_t* out) {
  for (int64_t at = thread * 8; at < dim; at += kThreads * 8) {
    const Chunk x = *reinterpret_cast<const Chunk*>(row + at), w = *reinterpret_cast<const Chunk*>(weight + at);
    Chunk y;
    for (int i = 0; i < 8; ++i) {
      const float rounded = bf16::widen(bf16::nearest(bf16::widen(x.x[i]) * scale));
      y.x[i] = bf16::nearest(rounded * bf16::widen(w.x[i]));
    }
    *reinterpret_cast<Chunk*>(out + at) = y;
  }
}

}  // namespace swiftspec::norm
