// Moves of cache slots on a GPU, all but the launch; host code too.
//
// A block owns one head's slots of one layer and moves them in ascending order: it reads a step's pieces of 16 bytes,
// then writes them. A later step reads slots that lie after everything written before, since sources ascend and lie at
// or after where they go; so slots may move within their own buffer.
#pragma once

#include <cstdint>

#include "common/arguments.h"
#include "common/host_device.h"

namespace swiftspec::cache_ops {

constexpr int kThreads = 256;
constexpr int kPiecesPerThread = 4;  // pieces that a thread moves at a time

SWIFTSPEC_HD int64_t pieces(const MoveArgs& a) { return a.count * (a.slot_bytes / 16); }

SWIFTSPEC_HD int64_t slots_of(const MoveArgs& a, int64_t layer, int64_t head) {
  return layer * a.layer_stride + head * a.capacity * a.slot_bytes;
}

SWIFTSPEC_HD int64_t from(const MoveArgs& a, int64_t piece) {
  const int64_t each = a.slot_bytes / 16;
  return a.source[piece / each] * a.slot_bytes + piece % each * 16;
}

SWIFTSPEC_HD int64_t to(const MoveArgs& a, int64_t piece) { return a.start * a.slot_bytes + piece * 16; }

}  // namespace swiftspec::cache_ops
