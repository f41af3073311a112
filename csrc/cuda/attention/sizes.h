// How attention is cut: keys into units, tiles and parts, rows into groups.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace swiftspec::attention {

constexpr int kUnit = 16;                     // keys of a fragment
constexpr int kTile = 128;                    // keys of a block
constexpr int kUnits = kTile / kUnit;         // of a tile
constexpr int kCluster = 8;                   // blocks that join their results through each other's shared memory
constexpr int kPart = kTile * kCluster;       // keys of a cluster
constexpr int kColumns = 64;                  // rows x heads of a group
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStage = 40;                    // units of keys or values in shared memory
constexpr int kOwnUnits = kColumns * kUnits;  // units for single rows, at most
constexpr int kPad = 8;                       // elements after a line, so that eight lines meet 32 different banks
constexpr int kScoreLine = kTile + 4;         // floats from one column's scores to the next one's

SWIFTSPEC_HD constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
SWIFTSPEC_HD constexpr int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }
SWIFTSPEC_HD constexpr int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace swiftspec::attention
