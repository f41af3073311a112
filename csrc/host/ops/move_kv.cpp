// KV commit: moves slots forward within one sequence's region, in every layer and head.
#include <cstring>

#include "kernels_host.h"

namespace swiftspec::host {

void move_kv(const MoveArgs& a) {
  for (int64_t layer = 0; layer < a.layers; ++layer) {
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      uint8_t* slots = a.region + layer * a.layer_stride + head * a.capacity * a.slot_bytes;
      // sources ascend and are not before their destinations, so nothing is overwritten before it is read
      for (int64_t i = 0; i < a.count; ++i) {
        std::memmove(slots + (a.start + i) * a.slot_bytes, slots + a.source[i] * a.slot_bytes,
                     static_cast<size_t>(a.slot_bytes));
      }
    }
  }
}

}  // namespace swiftspec::host
