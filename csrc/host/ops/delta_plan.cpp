// Plan of the delta layers: for each row its fold point, and the slots that it reads from there on.
#include <algorithm>
#include <cstring>

#include "kernels_host.h"

namespace swiftspec::host {

namespace {

// The fold point of a position: fold_point in swiftspec/cache/delta.py.
int64_t fold_point(int64_t position) {
  return std::max<int64_t>(position / kFoldPositions - 1, 0) * kFoldPositions;
}

// Replaces the slots in `visible` of the rows of each fold point by their places among all slots that these rows see.
void add_groups(DeltaPlan& plan) {
  const auto count = static_cast<int64_t>(plan.rows.size());
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    const int64_t first = plan.rows[static_cast<size_t>(begin)].first;
    std::vector<int64_t> seen;
    for (; end < count && plan.rows[static_cast<size_t>(end)].first == first; ++end) {
      const DeltaRow& row = plan.rows[static_cast<size_t>(end)];
      seen.insert(seen.end(), plan.visible.begin() + row.begin, plan.visible.begin() + row.begin + row.count);
    }
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    for (int64_t r = begin; r < end; ++r) {
      const DeltaRow& row = plan.rows[static_cast<size_t>(r)];
      auto place = seen.begin();
      for (int64_t i = row.begin; i < row.begin + row.count; ++i) {
        int64_t& slot = plan.visible[static_cast<size_t>(i)];
        place = std::lower_bound(place, seen.end(), slot);
        slot = place - seen.begin();
      }
    }
    plan.groups.push_back({first, begin, end, static_cast<int64_t>(plan.slots.size()), static_cast<int64_t>(seen.size())});
    plan.slots.insert(plan.slots.end(), seen.begin(), seen.end());
  }
}

}  // namespace

DeltaPlan plan_delta(const int64_t* slots, const uint8_t* mask, int64_t rows, int64_t width, int64_t length,
                     int64_t folded) {
  DeltaPlan plan;
  const int64_t masked = length - width;  // the slots before it are visible to every row
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* sees = mask + row * width;
    const void* hidden = std::memchr(sees, 0, static_cast<size_t>(width));
    const int64_t position = masked + std::count_if(sees, sees + width, [](uint8_t x) { return x != 0; }) - 1;
    int64_t first = std::max<int64_t>(fold_point(position) - folded, 0);
    if (hidden != nullptr) {  // far down a tree the fold point may lie behind a slot that the row does not see
      const int64_t run = masked + (static_cast<const uint8_t*>(hidden) - sees) - folded;
      first = std::min(first, run / kFoldPositions * kFoldPositions);
    }
    const auto begin = static_cast<int64_t>(plan.visible.size());
    for (int64_t slot = folded + first; slot < length; ++slot) {
      if (slot < masked || sees[slot - masked] != 0) plan.visible.push_back(slot - folded);
    }
    plan.rows.push_back({row, slots[row] - folded, first, begin, static_cast<int64_t>(plan.visible.size()) - begin});
  }
  std::stable_sort(plan.rows.begin(), plan.rows.end(), [](const DeltaRow& a, const DeltaRow& b) {
    return a.first != b.first ? a.first < b.first : a.slot < b.slot;
  });
  add_groups(plan);
  return plan;
}

}  // namespace swiftspec::host
