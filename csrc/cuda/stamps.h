// Records of the stamps of stamps.cuh, and their recorder on the host. Only in builds with SWIFTSPEC_STAMPS.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace swiftspec::cuda::stamps {

// The points of a kernel. The names of projections and those of attention share the numbers. With several turns or
// tiles, points from kLastTile on (attention: from kPlanned on) have the clock of the last one.
enum Point {
  kStart = 0,
  kRing = 1,            // the first copies of weights are requested
  kDependencies = 2,    // griddepcontrol.wait has returned
  kNormScales = 3,      // factors of the RMSNorm are there
  kStagedByWarp = 4,    // this warp has staged its part of x
  kStaged = 5,          // all warps of the block have
  kFirstTile = 6,       // the first tile has arrived
  kLastTile = 7,        // the last one is multiplied
  kWarpSum = 8,         // sums of the warps are added
  kClusterBarrier = 9,  // barrier of the cluster; of attention, too
  kStored = 10,         // results are stored; of attention, too
  kExit = 11,
  // attention
  kCounts = 1,   // numbers of keys per row are read
  kPlanned = 2,  // units are planned
  kWaited = 3,   // the wait for the previous kernel has returned
  kRequested = 4,  // keys and values are requested
  kQueries = 5,
  kScores = 6,
  kSoftmax = 7,
  kValues = 8,
};
constexpr int kPoints = 12;
// Of a record, 8 bytes each: clocks of the points, the start in nanoseconds, block << 32 | multiprocessor, unused.
constexpr int kRecordWords = 16;
constexpr int64_t kPageBytes = 2 << 20;  // of device memory

// Divides a buffer among the launches of this process, in their order; launches that find no place have no stamps.
// Launches of a captured graph keep their place in every replay.
class Recorder {
 public:
  struct Entry {
    std::string kernel;
    int64_t first, warps;  // records
  };

  static Recorder& get() {
    static Recorder recorder;
    return recorder;
  }
  void start(uint64_t* buffer, int64_t records) { *this = {buffer, records}; }
  std::vector<Entry> stop() { return std::exchange(*this, {}).entries_; }

  // The records of a launch with this number of warps, or null.
  uint64_t* next(std::string kernel, int64_t warps) {
    if (used_ + warps > records_) return nullptr;
    uint64_t* place = buffer_ + used_ * kRecordWords;
    entries_.push_back({std::move(kernel), used_, warps});
    used_ += warps;
    return place;
  }

 private:
  Recorder() = default;
  Recorder(uint64_t* buffer, int64_t records) : buffer_(buffer), records_(records) {}

  uint64_t* buffer_ = nullptr;
  int64_t records_ = 0, used_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace swiftspec::cuda::stamps
