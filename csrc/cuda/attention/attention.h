// Tree attention on a device, all but the launches: what each row sees, and what a warp or a thread does in each step.
// Host code too, so that tests run the whole kernel on a CPU (tests/native/attention_driver.cpp).
//
// A row's keys are numbered in the order of their positions. Key number i lies in slot i as long as the row sees every
// slot before it; from there on the row's own list names it. Keys go in tiles of 128, one to a block; eight tiles are a
// cluster's part. All of a sum's places follow from the key's number: tile i / 128, warp and fragment from i % 128. So a
// row's result does not depend, to the bit, on the other rows, nor on where its keys lie.
//
// Rows that share a sequence form groups of up to 64 columns, a row's heads side by side: they are the N of the MMA, keys
// and then dimensions are its M. A tile is loaded in units of 16 keys: those that all rows of the group see in the same
// slots once, the others for each row.
#pragma once

#include "kernels_host.h"
#include "common/warp.h"

namespace swiftspec::attention {

using cuda::AttentionPlan;
using cuda::RowGroup;
using warp::Chunk;

constexpr int kUnit = 16;       // keys of a fragment
constexpr int kTile = 128;      // keys of a block
constexpr int kUnits = kTile / kUnit;
constexpr int kCluster = 8;     // blocks that join their results through each other's shared memory
constexpr int kPart = kTile * kCluster;  // keys of a cluster
constexpr int kColumns = 64;    // rows x heads of a group
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStage = 40;      // units of keys or values in shared memory
constexpr int kOwnUnits = kColumns * kUnits;
constexpr int kPad = 8;         // elements after a line, so that eight lines meet 32 different banks
constexpr int kScoreLine = kTile + 4;

SWIFTSPEC_HD constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
SWIFTSPEC_HD constexpr int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }
SWIFTSPEC_HD constexpr int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

// ---- What the rows see: once a forward.

SWIFTSPEC_HD int64_t sequence_of(const AttentionPlan& p, int64_t row) { return p.sequence == nullptr ? 0 : p.sequence[row]; }

// The first slot of the mask's window; its column 0 is that slot, or stands for one before slot 0.
SWIFTSPEC_HD int64_t window_start(const AttentionPlan& p, int64_t sequence) {
  return most(p.kv_len[sequence] - p.width, 0);
}

SWIFTSPEC_HD int64_t rows_of_group(const AttentionPlan& p) { return kColumns / (p.heads / p.kv_heads); }

// Which entry of the table of groups begins with `row`, or -1. With one sequence the table is dense, else sparse: a group
// ends where the sequence changes.
SWIFTSPEC_HD int64_t groups_of(const AttentionPlan& p) {
  return p.sequence == nullptr ? parts(p.rows, rows_of_group(p)) : p.rows;
}

// The rows of entry `i`: none where no group begins.
SWIFTSPEC_HD RowGroup rows_at(const AttentionPlan& p, int64_t i) {
  const int64_t full = rows_of_group(p);
  int64_t first = i, count = 1;
  if (p.sequence == nullptr) {
    first = i * full;
    count = least(full, p.rows - first);
  } else {
    int64_t start = i;
    while (start > 0 && p.sequence[start - 1] == p.sequence[i]) --start;
    if ((i - start) % full != 0) return {static_cast<int32_t>(i), 0, 0, 0};
    while (count < full && i + count < p.rows && p.sequence[i + count] == p.sequence[i]) ++count;
  }
  return {static_cast<int32_t>(first), static_cast<int32_t>(count), 0, 0};
}

// Notes whose new key a slot holds. Of rows with one slot any may win: they are copies, or nobody reads them.
SWIFTSPEC_HD void claim(const AttentionPlan& p, int64_t row) {
  p.owner[sequence_of(p, row) * p.capacity + p.slots[row]] = static_cast<int32_t>(row);
}

// The row of this batch whose new key the slot holds, or -1. `owner` is never cleared, so what it says is checked.
SWIFTSPEC_HD int32_t owner_of(const AttentionPlan& p, int64_t sequence, int64_t slot) {
  const int32_t row = p.owner[sequence * p.capacity + slot];
  const bool here = row >= 0 && row < p.rows && p.slots[row] == slot && sequence_of(p, row) == sequence;
  return here ? row : -1;
}

// A warp lists what a row sees of its window: slots, or ~row where the key is new. Returns the leading slots of the
// sequence that the row sees without a gap.
SWIFTSPEC_HD int64_t list_row(const AttentionPlan& p, int64_t row) {
  const int64_t sequence = sequence_of(p, row), start = window_start(p, sequence);
  const int64_t before = p.kv_len[sequence] - p.width;  // below 0: the first columns stand for no slot
  const int64_t first = start - before;
  int64_t seen = 0, run = p.width - first;
  for (int64_t base = first; base < p.width; base += 32) {
    warp::PerLane<bool> visible;
    SWIFTSPEC_EACH_LANE(lane) {
      const int64_t column = base + lane;
      visible(lane) = column < p.width && p.mask[row * p.width + column] != 0;
    }
    const uint32_t word = warp::ballot(visible);
    if (~word != 0) run = least(run, base - first + warp::lowest(~word));
    SWIFTSPEC_EACH_LANE(lane) {
      if (visible(lane)) {
        const int64_t slot = before + base + lane;
        const int32_t owner = owner_of(p, sequence, slot);
        const int64_t place = seen + warp::popcount(word & ((1u << lane) - 1));
        p.tail[row * p.width + place] = owner >= 0 ? ~owner : static_cast<int32_t>(slot);
      }
    }
    seen += warp::popcount(word);
  }
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) p.count[row] = static_cast<int32_t>(start + seen);
  }
  return start + run;
}

// ---- One block: a tile of keys, a group of rows, a key-value head.

template <int kDim>
struct Shared {
  alignas(16) uint16_t stage[kStage][kUnit][kDim + kPad];
  alignas(16) uint16_t queries[kColumns][kDim + kPad];
  alignas(16) float scores[kColumns][kScoreLine];  // then, in place, shares in bfloat16; then the output [kDim]
  float top[kColumns];    // of a column's scores in this tile, base 2; -inf without keys
  float total[kColumns];  // of its shares
  int32_t seen[kColumns];  // keys of each row
  uint16_t own[kOwnUnits];  // of the units for single rows: row * kUnits + place in the tile
  int32_t shared_units, units;
  int32_t last;  // this cluster was the last of its group
};

struct Job {
  const AttentionPlan& p;
  const uint16_t* qkv;
  uint16_t *keys, *values;  // of the layer
  uint16_t* out;
  int64_t head;  // of keys and values
  RowGroup group;
  int64_t entry;  // of the group
  int64_t part;   // the cluster's
  int64_t tile;

  SWIFTSPEC_HD int64_t sequence() const { return sequence_of(p, group.first); }
  SWIFTSPEC_HD int heads() const { return static_cast<int>(p.heads / p.kv_heads); }
  SWIFTSPEC_HD int columns() const { return group.count * heads(); }
  SWIFTSPEC_HD int column_blocks() const { return (columns() + 7) / 8; }
  SWIFTSPEC_HD int64_t first_key() const { return tile * kTile; }
  SWIFTSPEC_HD int64_t width() const { return (p.heads + 2 * p.kv_heads) * p.dim; }
  SWIFTSPEC_HD int64_t region() const { return (sequence() * p.kv_heads + head) * p.capacity * p.dim; }
  SWIFTSPEC_HD int64_t table() const { return parts(p.capacity, kPart); }  // parts that a sequence may have
  SWIFTSPEC_HD int64_t scratch(int64_t which, int column) const {
    return ((head * table() + which) * p.rows + group.first) * heads() + column;
  }
};

// Eight elements from `at` on of a head [kDim] after RoPE at a row's position: x cos + half_rotation(x) sin, where `sin`
// has the sign of the rotation; rounded where the reference rounds.
template <int kDim>
SWIFTSPEC_HD Chunk rotated(const AttentionPlan& p, const uint16_t* x, int64_t row, int at) {
  const int64_t table = p.positions[row] * kDim + at;
  const Chunk straight = *reinterpret_cast<const Chunk*>(x + at);
  const Chunk turned = *reinterpret_cast<const Chunk*>(x + (at + kDim / 2) % kDim);
  const Chunk cos = *reinterpret_cast<const Chunk*>(static_cast<const uint16_t*>(p.cos) + table);
  const Chunk sin = *reinterpret_cast<const Chunk*>(static_cast<const uint16_t*>(p.sin) + table);
  Chunk out;
  for (int i = 0; i < 8; ++i) {
    const float first = warp::widen(warp::to_bf16(noise::mul(warp::widen(straight.x[i]), warp::widen(cos.x[i]))));
    out.x[i] = warp::to_bf16(fmaf(warp::widen(turned.x[i]), warp::widen(sin.x[i]), first));
  }
  return out;
}

// New keys and values of this group's rows go to the cache; the blocks of the first part share them.
template <int kDim>
SWIFTSPEC_HD void append(const Job& j, int rank, int thread) {
  constexpr int kChunks = kDim / 8;
  for (int i = thread; i < static_cast<int>(parts(j.group.count - rank, kCluster)) * kChunks; i += kThreads) {
    const int64_t row = j.group.first + rank + i / kChunks * kCluster;
    const int at = i % kChunks * 8;
    const uint16_t* k = j.qkv + row * j.width() + (j.p.heads + j.head) * kDim;
    const uint16_t* v = k + j.p.kv_heads * kDim;
    const int64_t place = j.region() + j.p.slots[row] * kDim + at;
    *reinterpret_cast<Chunk*>(j.keys + place) = rotated<kDim>(j.p, k, row, at);
    *reinterpret_cast<Chunk*>(j.values + place) = *reinterpret_cast<const Chunk*>(v + at);
  }
}

template <int kDim>
SWIFTSPEC_HD void load_queries(const Job& j, Shared<kDim>& s, int thread) {
  constexpr int kChunks = kDim / 8;
  for (int i = thread; i < j.column_blocks() * 8 * kChunks; i += kThreads) {
    const int column = i / kChunks, at = i % kChunks * 8;
    Chunk chunk = {};
    if (column < j.columns()) {
      const int64_t row = j.group.first + column / j.heads();
      const int64_t head = j.head * j.heads() + column % j.heads();
      chunk = rotated<kDim>(j.p, j.qkv + row * j.width() + head * kDim, row, at);
    }
    *reinterpret_cast<Chunk*>(&s.queries[column][at]) = chunk;
  }
  if (thread < kColumns) s.seen[thread] = thread < j.group.count ? j.p.count[j.group.first + thread] : 0;
}

// Which units the tile has: first those that all rows share, then each row's own. Reads `seen`.
template <int kDim>
SWIFTSPEC_HD void plan_units(const Job& j, Shared<kDim>& s, int thread) {
  const int64_t shared = least(most(j.group.base - j.first_key(), 0) / kUnit, kUnits);
  const auto own = [&](int row) {
    const int64_t keys = least(most(s.seen[row] - j.first_key(), 0), kTile);
    return static_cast<int>(most(parts(keys, kUnit) - shared, 0));
  };
  if (thread >= j.group.count) return;
  int at = 0;
  for (int row = 0; row < thread; ++row) at += own(row);
  const int mine = own(thread);
  for (int i = 0; i < mine; ++i) s.own[at + i] = static_cast<uint16_t>(thread * kUnits + shared + i);
  if (thread == j.group.count - 1) {
    s.shared_units = static_cast<int32_t>(shared);
    s.units = static_cast<int32_t>(shared) + at + mine;
  }
}

struct Unit {
  int row;           // of the group: whose list names the keys
  int place;         // in the tile
  int first, end;    // columns
};

template <int kDim>
SWIFTSPEC_HD Unit unit_at(const Job& j, const Shared<kDim>& s, int i) {
  if (i < s.shared_units) return {0, i, 0, j.columns()};
  const int code = s.own[i - s.shared_units], row = code / kUnits;
  return {row, code % kUnits, row * j.heads(), (row + 1) * j.heads()};
}

enum class Kind : uint8_t { keys, values };

// Units first .. first + count - 1 into the stage from `slot` on. Keys that a row does not have are zeros.
template <Kind kKind, int kDim>
SWIFTSPEC_HD void load_units(const Job& j, Shared<kDim>& s, int first, int count, int slot, int thread) {
  constexpr int kChunks = kDim / 8, kSize = kUnit * kChunks;
  const AttentionPlan& p = j.p;
  const int64_t start = window_start(p, j.sequence());
  const uint16_t* cache = (kKind == Kind::keys ? j.keys : j.values) + j.region();
  for (int i = thread; i < count * kSize; i += kThreads) {
    const Unit unit = unit_at(j, s, first + i / kSize);
    const int key = i % kSize / kChunks, at = i % kChunks * 8;
    const int64_t number = j.first_key() + unit.place * kUnit + key, row = j.group.first + unit.row;
    auto* to = reinterpret_cast<Chunk*>(&s.stage[slot + i / kSize][key][at]);
    if (number >= s.seen[unit.row]) {
      *to = Chunk{};
      continue;
    }
    const int64_t from = number < start ? number : p.tail[row * p.width + number - start];
    if (from >= 0) {
      warp::fetch(to, reinterpret_cast<const Chunk*>(cache + from * kDim + at));
    } else {
      const uint16_t* fresh = j.qkv + ~from * j.width() + (p.heads + j.head) * kDim;
      *to = kKind == Kind::keys ? rotated<kDim>(p, fresh, ~from, at)
                                : *reinterpret_cast<const Chunk*>(fresh + p.kv_heads * kDim + at);
    }
  }
}

// B of a product over `k .. k + 15`, columns 8 n .. 8 n + 7, from lines of bfloat16; others than first .. end - 1 are 0.
SWIFTSPEC_HD warp::FragmentB load_columns(const uint16_t* lines, int64_t stride, int n, int k, int first, int end) {
  warp::FragmentB b;
  SWIFTSPEC_EACH_LANE(lane) {
    const int column = 8 * n + warp::b_column(lane);
    for (int i = 0; i < 2; ++i) {
      const uint16_t* pair = lines + column * stride + k + warp::b_row(lane, i);
      b(lane).r[i] = column >= first && column < end ? *reinterpret_cast<const uint32_t*>(pair) : 0;
    }
  }
  return b;
}

// Scores of units first .. first + count - 1, which lie in the stage from slot 0 on: this warp's share of them.
template <int kDim>
SWIFTSPEC_HD void score(const Job& j, Shared<kDim>& s, int first, int count, int warp_index) {
  for (int u = warp_index; u < count; u += kWarps) {
    const Unit unit = unit_at(j, s, first + u);
    const int from = unit.first / 8, to = (unit.end + 7) / 8;
    warp::FragmentC sums[kColumns / 8] = {};
SWIFTSPEC_UNROLL
    for (int k = 0; k < kDim; k += 16) {
      warp::PerLane<const uint16_t*> lines;
      SWIFTSPEC_EACH_LANE(lane) { lines(lane) = &s.stage[u][lane % 16][k + lane / 16 * 8]; }
      warp::FragmentA a;
      warp::load_matrices<false>(a, lines);
SWIFTSPEC_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        if (n >= from && n < to) {
          warp::multiply(sums[n], a, load_columns(s.queries[0], kDim + kPad, n, k, 0, kColumns));
        }
      }
    }
    SWIFTSPEC_EACH_LANE(lane) {
SWIFTSPEC_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
SWIFTSPEC_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int column = 8 * n + warp::c_column(lane, i);
          if (column >= unit.first && column < unit.end) {
            s.scores[column][unit.place * kUnit + warp::c_row(lane, i)] = sums[n](lane).r[i];
          }
        }
      }
    }
  }
}

// Scores become shares 2^(score - top) in bfloat16, in place; zero for keys that the row does not have.
template <int kDim>
SWIFTSPEC_HD void soften(const Job& j, Shared<kDim>& s, int warp_index) {
  constexpr int kEach = kTile / 32;
  const float none = -INFINITY;
  for (int column = warp_index; column < 8 * j.column_blocks(); column += kWarps) {
    const int64_t keys = column < j.columns() ? s.seen[column / j.heads()] - j.first_key() : 0;
    warp::PerLane<warp::Regs<kEach, float>> x;
    warp::PerLane<float> top, total;
    SWIFTSPEC_EACH_LANE(lane) {
      top(lane) = none;
      for (int i = 0; i < kEach; ++i) {
        const int key = lane + 32 * i;
        x(lane).r[i] = key < keys ? noise::mul(s.scores[column][key], j.p.scale) : none;
        top(lane) = fmaxf(top(lane), x(lane).r[i]);
      }
    }
    top = warp::joined(top, [](float a, float b) { return fmaxf(a, b); });
    warp::sync();  // all have read before anyone writes
    SWIFTSPEC_EACH_LANE(lane) {
      auto* shares = reinterpret_cast<uint16_t*>(s.scores[column]);
      total(lane) = 0;
      for (int i = 0; i < kEach; ++i) {
        const int key = lane + 32 * i;
        const uint16_t share = warp::to_bf16(key < keys ? exp2f(x(lane).r[i] - top(lane)) : 0);
        shares[key] = share;
        total(lane) += warp::widen(share);
      }
    }
    total = warp::joined(total, [](float a, float b) { return a + b; });
    SWIFTSPEC_EACH_LANE(lane) {
      if (lane == 0) {
        s.top[column] = top(lane);
        s.total[column] = total(lane);
      }
    }
  }
}

// The warps share the output by blocks of 16 dimensions, and for narrow heads by columns: warp w has dimensions
// 16 (w % kBlocks) and on, and of the blocks of columns every kSplit-th from w / kBlocks on.
template <int kDim>
struct Output {
  static constexpr int kBlocks = kDim / 16, kSplit = kWarps / kBlocks, kMine = kColumns / 8 / kSplit;
  warp::FragmentC sums[kMine];
  SWIFTSPEC_HD static int dimension(int warp_index) { return warp_index % kBlocks * 16; }
  SWIFTSPEC_HD static int columns(int warp_index, int i) { return i * kSplit + warp_index / kBlocks; }
};

// Adds the values of units first .. first + count - 1, which lie in the stage from `slot` on. A row's units come in the
// order of its keys; those of other rows add nothing.
template <int kDim>
SWIFTSPEC_HD void gather(const Job& j, const Shared<kDim>& s, Output<kDim>& out, int first, int count, int slot,
                         int warp_index) {
  for (int u = 0; u < count; ++u) {
    const Unit unit = unit_at(j, s, first + u);
    const int from = unit.first / 8, to = (unit.end + 7) / 8, dimension = out.dimension(warp_index);
    warp::PerLane<const uint16_t*> lines;
    SWIFTSPEC_EACH_LANE(lane) {
      lines(lane) = &s.stage[slot + u][lane % 8 + lane / 16 * 8][dimension + lane / 8 % 2 * 8];
    }
    warp::FragmentA a;
    warp::load_matrices<true>(a, lines);
    const auto* shares = reinterpret_cast<const uint16_t*>(s.scores[0]);
SWIFTSPEC_UNROLL
    for (int i = 0; i < Output<kDim>::kMine; ++i) {
      const int n = out.columns(warp_index, i);
      if (n >= from && n < to) {
        const auto b = load_columns(shares, 2 * kScoreLine, n, unit.place * kUnit, unit.first, unit.end);
        warp::multiply(out.sums[i], a, b);
      }
    }
  }
}

// The output takes the shares' place.
template <int kDim>
SWIFTSPEC_HD void put_down(const Job& j, Shared<kDim>& s, const Output<kDim>& out, int warp_index) {
  SWIFTSPEC_EACH_LANE(lane) {
SWIFTSPEC_UNROLL
    for (int b = 0; b < Output<kDim>::kMine; ++b) {
      const int n = out.columns(warp_index, b);
      for (int i = 0; i < 4 && n < j.column_blocks(); ++i) {
        const int dimension = out.dimension(warp_index) + warp::c_row(lane, i);
        s.scores[8 * n + warp::c_column(lane, i)][dimension] = out.sums[b](lane).r[i];
      }
    }
  }
}

// ---- A block's way through its tile. On a CPU its threads and warps take turns.

#ifdef __CUDA_ARCH__
#define SWIFTSPEC_EACH_THREAD(thread) if (const int thread = static_cast<int>(threadIdx.x); true)
#define SWIFTSPEC_EACH_WARP(index) if (const int index = static_cast<int>(threadIdx.x) / 32; true)
#else
#define SWIFTSPEC_EACH_THREAD(thread) for (int thread = 0; thread < kThreads; ++thread)
#define SWIFTSPEC_EACH_WARP(index) for (int index = 0; index < kWarps; ++index)
#endif

SWIFTSPEC_HD void block_sync() {
#ifdef __CUDA_ARCH__
  __syncthreads();
#endif
}

template <class T>
struct PerWarp {
#ifdef __CUDA_ARCH__
  T here;
  SWIFTSPEC_HD T& operator()(int) { return here; }
#else
  T warps[kWarps];
  SWIFTSPEC_HD T& operator()(int index) { return warps[index]; }
#endif
};

template <Kind kKind, int kDim>
SWIFTSPEC_HD void load(const Job& j, Shared<kDim>& s, int first, int count, int slot) {
  SWIFTSPEC_EACH_THREAD(thread) {
    load_units<kKind>(j, s, first, count, slot, thread);
    warp::end_fetches();
  }
}

template <int kDim>
SWIFTSPEC_HD void score_tile(const Job& j, Shared<kDim>& s, bool at_once) {
  for (int first = 0; first < s.units; first += kStage) {
    const int count = static_cast<int>(least(s.units - first, kStage));
    if (!at_once) {
      block_sync();
      load<Kind::keys>(j, s, first, count, 0);
      warp::arrived<0>();
    } else {
      warp::arrived<1>();  // the keys; the values may be under way
    }
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { score(j, s, first, count, index); }
  }
}

template <int kDim>
SWIFTSPEC_HD void gather_tile(const Job& j, Shared<kDim>& s, PerWarp<Output<kDim>>& out, bool at_once) {
  for (int first = 0; first < s.units; first += kStage) {
    const int count = static_cast<int>(least(s.units - first, kStage));
    if (!at_once) {
      block_sync();
      load<Kind::values>(j, s, first, count, 0);
    }
    warp::arrived<0>();
    block_sync();
    SWIFTSPEC_EACH_WARP(index) { gather(j, s, out(index), first, count, at_once ? kStage / 2 : 0, index); }
  }
}

// From queries and `seen` to the tile's output. `held` is the tile of which all keys and values lie in the stage, or -1:
// rows of many groups then read a shared prefix once.
template <int kDim>
SWIFTSPEC_HD void attend(const Job& j, Shared<kDim>& s, int64_t& held) {
  SWIFTSPEC_EACH_THREAD(thread) { plan_units(j, s, thread); }
  block_sync();
  const bool at_once = s.units <= kStage / 2, whole = s.shared_units == kUnits;
  const int64_t name = j.sequence() * parts(j.p.capacity, kTile) + j.tile;
  if (at_once && !(whole && held == name)) {
    load<Kind::keys>(j, s, 0, s.units, 0);
    load<Kind::values>(j, s, 0, s.units, kStage / 2);
  }
  held = whole ? name : -1;
  score_tile(j, s, at_once);
  block_sync();
  SWIFTSPEC_EACH_WARP(index) { soften(j, s, index); }
  block_sync();
  PerWarp<Output<kDim>> out = {};
  gather_tile(j, s, out, at_once);
  block_sync();
  SWIFTSPEC_EACH_WARP(index) { put_down(j, s, out(index), index); }
}

// ---- Joining: the tiles of a cluster, then the clusters of a row.

struct Piece {
  float top, total, value;  // value: of one dimension
};

// `count` pieces in their order; those without keys change nothing, to the bit.
template <class At>
SWIFTSPEC_HD Piece join(int64_t count, At at) {
  Piece sum = {-INFINITY, 0, 0};
  for (int64_t i = 0; i < count; ++i) sum.top = fmaxf(sum.top, at(i).top);
  for (int64_t i = 0; i < count; ++i) {
    const Piece piece = at(i);
    if (piece.top == -INFINITY) continue;
    const float weight = exp2f(piece.top - sum.top);
    sum.total = fmaf(weight, piece.total, sum.total);
    sum.value = fmaf(weight, piece.value, sum.value);
  }
  return sum;
}

SWIFTSPEC_HD void write_out(const Job& j, int column, int dimension, const Piece& sum) {
  const int64_t row = j.group.first + column / j.heads(), head = j.head * j.heads() + column % j.heads();
  j.out[(row * j.p.heads + head) * j.p.dim + dimension] = warp::to_bf16(noise::div(sum.value, sum.total));
}

// Calls back for every (column, dimension) that falls to this thread of the cluster's block `rank`.
template <int kDim, class Do>
SWIFTSPEC_HD void each_mine(const Job& j, int rank, int thread, Do work) {
  for (int i = thread; i < static_cast<int>(parts(j.columns() - rank, kCluster)) * kDim; i += kThreads) {
    work(rank + i / kDim * kCluster, i % kDim);
  }
}

// The cluster's tiles; `block(i)` is block i's shared memory. A row that fits one cluster is done.
template <int kDim, class Blocks>
SWIFTSPEC_HD void join_tiles(const Job& j, int rank, int thread, bool single, Blocks block) {
  each_mine<kDim>(j, rank, thread, [&](int column, int dimension) {
    const Piece sum = join(kCluster, [&](int64_t i) {
      const Shared<kDim>* s = block(static_cast<int>(i));
      const float top = s->top[column];
      return top == -INFINITY ? Piece{top, 0, 0} : Piece{top, s->total[column], s->scores[column][dimension]};
    });
    if (single) return write_out(j, column, dimension, sum);
    const int64_t at = j.scratch(j.part, column);
    j.p.part_values[at * kDim + dimension] = sum.value;
    if (dimension == 0) {
      j.p.part_sums[2 * at] = sum.top;
      j.p.part_sums[2 * at + 1] = sum.total;
    }
  });
}

// What other blocks wrote before this one was told so: past L1.
SWIFTSPEC_HD float written(const float* p) {
#ifdef __CUDA_ARCH__
  return __ldcg(p);
#else
  return *p;
#endif
}

// The last cluster of a group: its `count` parts.
template <int kDim>
SWIFTSPEC_HD void join_parts(const Job& j, int rank, int thread, int64_t count) {
  each_mine<kDim>(j, rank, thread, [&](int column, int dimension) {
    write_out(j, column, dimension, join(count, [&](int64_t i) {
                const int64_t at = j.scratch(i, column);
                const float top = written(j.p.part_sums + 2 * at);
                if (top == -INFINITY) return Piece{top, 0, 0};
                return Piece{top, written(j.p.part_sums + 2 * at + 1), written(j.p.part_values + at * kDim + dimension)};
              }));
  });
}

}  // namespace swiftspec::attention
