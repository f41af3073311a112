// Moves of cache slots and the norm of a row on a device, all but the launches; host code too.
#pragma once

#include "kernels_host.h"
#include "common/warp.h"

namespace swiftspec::rows {

using host::MoveArgs;
using warp::Chunk;

constexpr int kThreads = 256;
constexpr int kEach = 4;  // pieces of 16 bytes that a thread moves at a time

// A block owns one head's slots of one layer and moves them in ascending order: it reads a step's pieces, then writes
// them. A later step reads slots that lie after everything written before, since sources ascend and lie at or after
// their places; so slots may move in place.
SWIFTSPEC_HD int64_t pieces(const MoveArgs& a) { return a.count * (a.slot_bytes / 16); }

SWIFTSPEC_HD int64_t slots_of(const MoveArgs& a, int64_t layer, int64_t head) {
  return layer * a.layer_stride + head * a.capacity * a.slot_bytes;
}

SWIFTSPEC_HD int64_t from(const MoveArgs& a, int64_t piece) {
  const int64_t each = a.slot_bytes / 16;
  return a.source[piece / each] * a.slot_bytes + piece % each * 16;
}

SWIFTSPEC_HD int64_t to(const MoveArgs& a, int64_t piece) { return a.start * a.slot_bytes + piece * 16; }

// The sum of squares of a thread's elements of a row.
SWIFTSPEC_HD float squares(const uint16_t* row, int64_t dim, int thread) {
  float sum = 0;
  for (int64_t at = thread * 8; at < dim; at += kThreads * 8) {
    const Chunk chunk = *reinterpret_cast<const Chunk*>(row + at);
    for (int i = 0; i < 8; ++i) sum = fmaf(warp::widen(chunk.x[i]), warp::widen(chunk.x[i]), sum);
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
      const float rounded = warp::widen(warp::to_bf16(warp::widen(x.x[i]) * scale));
      y.x[i] = warp::to_bf16(rounded * warp::widen(w.x[i]));
    }
    *reinterpret_cast<Chunk*>(out + at) = y;
  }
}

}  // namespace swiftspec::rows
