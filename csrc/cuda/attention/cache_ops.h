// In-place moves of KV slots, without the launch; for host code and device code.
//
// A block moves the slots of one head of one layer in ascending order: in each step it reads pieces of 16 bytes and
// then writes them. A later step reads only slots after everything written so far, since sources are ascending and not
// before their destinations; so slots can be moved within their own buffer.
#pragma once

#include <cstdint>

#include "common/arguments.h"
#include "common/host_device.h"

namespace swiftspec::cache_ops {

constexpr int kThreads = 256;
constexpr int kPiecesPerThread = 4;  // in flight

// 32 bits are enough: a launch moves at most kMaxMovedSlots slots.
SWIFTSPEC_HD int pieces(const MoveArgs& a) { return static_cast<int>(a.count * (a.slot_bytes / 16)); }

SWIFTSPEC_HD int64_t slots_of(const MoveArgs& a, int64_t layer, int64_t head) {
  return layer * a.layer_stride + head * a.capacity * a.slot_bytes;
}

SWIFTSPEC_HD int64_t from(const MoveArgs& a, int piece) {
  const int each = static_cast<int>(a.slot_bytes / 16);
  return a.source[piece / each] * a.slot_bytes + piece % each * 16;
}

SWIFTSPEC_HD int64_t to(const MoveArgs& a, int piece) { return a.start * a.slot_bytes + int64_t{16} * piece; }

}  // namespace swiftspec::cache_ops
