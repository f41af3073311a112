// Plan of the delta layers: for each row the slots that it reads in folded form, and those from its fold point on.
#include <algorithm>
#include <compare>

#include "kernels_host.h"

namespace swiftspec::host {

namespace {

// The fold point of a position: fold_point in swiftspec/cache/delta.py.
int64_t fold_point(int64_t position) {
  return std::max<int64_t>(position / kFoldPositions - 1, 0) * kFoldPositions;
}

// Compares the ancestors of two rows before their fold points: fewer first, then by slot.
std::strong_ordering compare_folds(const DeltaPlan& plan, const DeltaRow& a, const DeltaRow& b) {
  if (a.folds != b.folds) return a.folds <=> b.folds;
  const auto first = plan.folds.begin() + a.begin_fold, second = plan.folds.begin() + b.begin_fold;
  return std::lexicographical_compare_three_way(first, first + a.folds, second, second + b.folds);
}

// Replaces the slots in `visible` of the rows of each group by their places among all slots that these rows see.
void add_groups(DeltaPlan& plan) {
  const auto count = static_cast<int64_t>(plan.rows.size());
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    const DeltaRow& first = plan.rows[static_cast<size_t>(begin)];
    std::vector<int64_t> seen;
    for (; end < count && compare_folds(plan, plan.rows[static_cast<size_t>(end)], first) == 0; ++end) {
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
    plan.groups.push_back({first.begin_fold, first.folds, begin, end, static_cast<int64_t>(plan.slots.size()),
                           static_cast<int64_t>(seen.size())});
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
    const int64_t position = masked + std::count_if(sees, sees + width, [](uint8_t x) { return x != 0; }) - 1;
    const int64_t begin_fold = static_cast<int64_t>(plan.folds.size());
    const int64_t begin = static_cast<int64_t>(plan.visible.size());
    int64_t to_fold = std::max<int64_t>(fold_point(position) - folded, 0);
    const int64_t folds = to_fold;
    for (int64_t slot = folded; slot < length; ++slot) {
      if (slot >= masked && sees[slot - masked] == 0) continue;
      (to_fold > 0 ? plan.folds : plan.visible).push_back(slot - folded);
      --to_fold;
    }
    plan.rows.push_back({row, slots[row] - folded, begin_fold, folds, begin,
                         static_cast<int64_t>(plan.visible.size()) - begin});
  }
  std::stable_sort(plan.rows.begin(), plan.rows.end(), [&](const DeltaRow& a, const DeltaRow& b) {
    const std::strong_ordering order = compare_folds(plan, a, b);
    return order != 0 ? order < 0 : a.slot < b.slot;
  });
  add_groups(plan);
  return plan;
}

}  // namespace swiftspec::host
