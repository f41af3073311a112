// Runs the CUDA attention kernel's code on a CPU, block by block and lane by lane, on buffers of exactly the documented
// sizes (test_cuda_code.py builds this with sanitizers), for the architecture SWIFTSPEC_ARCH. Shared memory and scratch
// start as NaN. Exits with 0, or prints what differs.
#include "cuda/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

using namespace swiftspec;
using namespace swiftspec::attention;

namespace {

std::mt19937 dice(11);

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(dice); }

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

std::vector<uint16_t> numbers(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> out(static_cast<size_t>(count));
  for (uint16_t& x : out) x = bf16::nearest(normal(dice));
  return out;
}

// One layer's attention: inputs and outputs.
struct Case {
  int64_t rows, width, sequences, heads, kv_heads, capacity, dim;
  std::vector<int64_t> positions, slots, sequence, kv_len;
  std::vector<uint8_t> mask;
  std::vector<uint16_t> cos, sin, qkv, keys, values, out;
  int32_t most = 3;  // parts
  AttentionShape shape = AttentionShape::kShort;
  bool prepared = false;

  void draw_numbers() {
    cos = numbers(capacity * dim), sin = numbers(capacity * dim);
    qkv = numbers(rows * (heads + 2 * kv_heads) * dim);
    keys = numbers(sequences * kv_heads * capacity * dim), values = numbers(sequences * kv_heads * capacity * dim);
  }

  void run() {
    if (shape == AttentionShape::kLong) return run_shape<AttentionShape::kLong>();
    if (shape == AttentionShape::kPaired) return run_shape<AttentionShape::kPaired>();
    run_shape<AttentionShape::kShort>();
  }

  template <AttentionShape kName>
  void run_shape() {
    dim == 64 ? run_as<DeviceShape<kName, 64>>() : run_as<DeviceShape<kName, 128>>();
  }

  template <class F>
  void run_as() {
    out.assign(static_cast<size_t>(rows * heads * dim), 0x7fc0);
    std::vector<int32_t> count(static_cast<size_t>(rows));
    std::vector<uint16_t> queries(static_cast<size_t>(rows * heads * dim), 0x7fc0);
    std::vector<int32_t> tail(static_cast<size_t>(rows * width), 1 << 30);
    AttentionSetup p{cos.data(), sin.data(), positions.data(), slots.data(), sequences > 1 ? sequence.data() : nullptr,
                    kv_len.data(), mask.data(), queries.data(), tail.data(), count.data(), nullptr, nullptr, nullptr,
                    nullptr, rows, width, sequences, heads, kv_heads, capacity, dim, 1,
                    1.44269504f / std::sqrt(static_cast<float>(dim)), static_cast<int32_t>(heads / kv_heads),
                    static_cast<int32_t>(kColumns / (heads / kv_heads)), most, shape, false, prepared};
    const int entries = group_table_size(p);
    const int64_t lines = rows * heads * part_count<F>(static_cast<int>(capacity), most);
    std::vector<RowGroup> groups(static_cast<size_t>(entries));
    std::vector<float> values_of(static_cast<size_t>(lines * dim), NAN), sums_of(static_cast<size_t>(lines * 2), NAN);
    p.groups = groups.data(), p.part_values = values_of.data(), p.part_sums = sums_of.data();
    int64_t grouped = 0;
    for (int i = 0; i < entries; ++i) {
      RowGroup& g = groups[static_cast<size_t>(i)] = group_rows_at(p, i);
      if (g.count == 0) continue;
      require(g.first == grouped, "groups must follow each other");
      grouped += g.count;
      g.base = g.appended = INT32_MAX;
      g.window = window_start(p, sequence_of(p, g.first));
      for (int row = 0; row < rows; ++row) g.appended = std::min(g.appended, appended_slot(p, row, sequence_of(p, g.first)));
      for (int row = g.first; row < g.first + g.count; ++row) {
        g.base = std::min(g.base, list_keys(p, row));
        g.keys = std::max(g.keys, count[static_cast<size_t>(row)]);
      }
    }
    require(grouped == rows, "every row is in a group");
    const std::vector<uint16_t> keys_before = keys, values_before = values;
    const auto append = [&] {
      for (int row = 0; row < rows; ++row) {
        for (int i = 0; i < row_pieces(p); ++i) {
          rope_append<F::kDim>(p, qkv.data(), keys.data(), values.data(), row, i, [] {});
        }
      }
    };
    append();
    const auto undo = [&] {  // as if the block started before the launch that appends
      if (!prepared) return;
      std::copy(keys_before.begin(), keys_before.end(), keys.begin());
      std::copy(values_before.begin(), values_before.end(), values.begin());
    };
    const auto shared = std::make_unique<SharedMemory<F>[]>(F::kCluster);
    std::memset(static_cast<void*>(shared.get()), 0xff, sizeof(SharedMemory<F>) * F::kCluster);
    for (int head = 0; head < kv_heads; ++head) {
      StageState stage_state[F::kCluster];
      for (int i = 0; i < entries; ++i) run_group<F>(p, i, head, shared.get(), stage_state, undo, append);
    }
  }

  template <class F, class Undo, class Append>
  void run_group(const AttentionSetup& p, int entry, int head, SharedMemory<F>* shared, StageState* stage_state,
                 Undo undo, Append append) {
    TileTask<F> j{p, keys.data(), values.data(), out.data(), head, p.groups[entry], entry, 0, 0};
    if (j.group.count == 0) return;
    const int parts = j.parts();
    const auto each = [](auto work) {
      for (int rank = 0; rank < F::kCluster; ++rank) {
        for (int thread = 0; thread < F::kThreads; ++thread) work(rank, thread);
      }
    };
    for (j.part = 0; j.part < parts; ++j.part) {
      each([&](int rank, int thread) { load_key_counts(j, shared[rank], thread); });
      for (int rank = 0; rank < F::kCluster; ++rank) {
        SharedMemory<F>& s = shared[rank];
        undo();
        attend(j, s, stage_state[rank], rank, BlockSteps{append, [&](int thread) { load_queries(j, s, thread); }});
      }
      append();
      each([&](int rank, int thread) {
        combine_blocks(j, rank, thread, parts == 1, [&](int i) { return shared + i; });
      });
    }
    if (parts > 1) each([&](int rank, int thread) { combine_parts(j, rank, thread, parts); });
  }

  std::vector<float> turned(const uint16_t* x, int64_t row) const {
    std::vector<float> all;
    for (int at = 0; at < dim; ++at) {
      const int64_t table = positions[static_cast<size_t>(row)] * dim + at;
      const float straight = bf16::widen(x[at]) * bf16::widen(cos[static_cast<size_t>(table)]);
      const float other = bf16::widen(x[(at + dim / 2) % dim]) * bf16::widen(sin[static_cast<size_t>(table)]);
      all.push_back(bf16::widen(bf16::nearest(bf16::widen(bf16::nearest(straight)) + other)));
    }
    return all;
  }

  // Compares with the definition in float64 on the cache after `run`, and checks the appended keys and values.
  void check() const {
    double wrong = 0, size = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t s = sequences > 1 ? sequence[static_cast<size_t>(row)] : 0, length = kv_len[static_cast<size_t>(s)];
      for (int64_t h = 0; h < heads; ++h) {
        const uint16_t* mine = qkv.data() + row * (heads + 2 * kv_heads) * dim;
        const auto q = turned(mine + h * dim, row);
        const int64_t g = h / (heads / kv_heads), region = (s * kv_heads + g) * capacity * dim;
        const auto k = turned(mine + (heads + g) * dim, row);
        for (int64_t i = 0; i < dim; ++i) {
          const auto at = static_cast<size_t>(region + slots[static_cast<size_t>(row)] * dim + i);
          require(std::abs(bf16::widen(keys[at]) - k[static_cast<size_t>(i)]) < 0.05, "a new key is not in the cache");
          require(values[at] == mine[(heads + kv_heads + g) * dim + i], "a new value is not in the cache");
        }
        std::vector<double> sum(static_cast<size_t>(dim));
        double total = 0;
        for (int64_t slot = 0; slot < length; ++slot) {
          const int64_t column = slot - (length - width);
          if (column >= 0 && mask[static_cast<size_t>(row * width + column)] == 0) continue;
          double score = 0;
          for (int64_t i = 0; i < dim; ++i) {
            score += q[static_cast<size_t>(i)] * bf16::widen(keys[static_cast<size_t>(region + slot * dim + i)]);
          }
          const double share = std::exp(score / std::sqrt(static_cast<double>(dim)));
          total += share;
          for (int64_t i = 0; i < dim; ++i) {
            sum[static_cast<size_t>(i)] += share * bf16::widen(values[static_cast<size_t>(region + slot * dim + i)]);
          }
        }
        for (int64_t i = 0; i < dim; ++i) {
          const double want = sum[static_cast<size_t>(i)] / total;
          const double got = bf16::widen(out[static_cast<size_t>((row * heads + h) * dim + i)]);
          wrong += (got - want) * (got - want), size += want * want;
        }
      }
    }
    require(std::sqrt(wrong / size) < 8e-3, "attention is not softmax(q k) v");
  }
};

// Rows in the last slots of each sequence; each sees itself and a random part of the window.
Case random_case(int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, std::vector<int64_t> lengths,
                 int64_t width, bool causal) {
  Case c{rows, width, static_cast<int64_t>(lengths.size()), heads, kv_heads,
         *std::max_element(lengths.begin(), lengths.end()) + 3, dim, {}, {}, {}, std::move(lengths), {}, {}, {}, {}, {},
         {}, {}};
  std::vector<int64_t> next;
  for (int64_t s = 0; s < c.sequences; ++s) next.push_back(c.kv_len[static_cast<size_t>(s)] - rows);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t s = c.sequences == 1 ? 0 : pick(0, static_cast<int>(c.sequences) - 1);
    const int64_t length = c.kv_len[static_cast<size_t>(s)], slot = next[static_cast<size_t>(s)]++;
    c.sequence.push_back(s), c.slots.push_back(slot), c.positions.push_back(pick(0, static_cast<int>(length) - 1));
    for (int64_t column = 0; column < width; ++column) {
      const int64_t at = length - width + column;
      c.mask.push_back(at == slot || (at < slot && (causal || pick(0, 2) > 0)));
    }
  }
  c.draw_numbers();
  return c;
}

// Padding rows, which repeat the last row with its slot, change neither the other rows nor the cache.
void check_padding() {
  Case alone = random_case(5, 4, 2, 64, {150}, 64, false), padded = alone;
  const auto line = static_cast<int64_t>(alone.qkv.size()) / alone.rows;
  for (int i = 0; i < 3; ++i) {
    const std::vector<uint16_t> numbers_of_last(padded.qkv.end() - line, padded.qkv.end());
    const std::vector<uint8_t> mask_of_last(padded.mask.end() - padded.width, padded.mask.end());
    padded.qkv.insert(padded.qkv.end(), numbers_of_last.begin(), numbers_of_last.end());
    padded.mask.insert(padded.mask.end(), mask_of_last.begin(), mask_of_last.end());
    padded.slots.push_back(padded.slots.back()), padded.positions.push_back(padded.positions.back());
    padded.sequence.push_back(0), ++padded.rows;
  }
  alone.run(), padded.run();
  require(padded.keys == alone.keys && padded.values == alone.values, "padding changes the cache");
  const auto row = static_cast<int64_t>(alone.out.size()) / alone.rows;
  for (int64_t i = 0; i < padded.rows; ++i) {
    const auto mine = padded.out.begin() + i * row, its = alone.out.begin() + std::min(i, alone.rows - 1) * row;
    require(std::equal(mine, mine + row, its), "padding changes a row");
  }
}

// The bits are the same if units are loaded before the wait for the launch that appends to the cache.
void check_early_loads(Case& c) {
  Case later_layer = c;
  later_layer.prepared = true;
  c.run(), later_layer.run();
  require(later_layer.out == c.out, "a unit is loaded before the forward has appended to it");
}

void check_cases() {
  const struct {
    int64_t heads, kv_heads, dim;
  } shapes[] = {{4, 2, 64}, {3, 1, 128}, {8, 1, 128}, {2, 2, 64}, {12, 2, 64}, {64, 1, 64}};
  for (const auto& shape : shapes) {
    for (const int64_t rows : {1, 5, 9}) {
      for (const auto& [length, width] : {std::pair<int64_t, int64_t>{9, 32}, {40, 16}, {150, 64}, {262, 256}}) {
        Case c = random_case(rows, shape.heads, shape.kv_heads, shape.dim, {length}, width, false);
        check_early_loads(c), c.check();
      }
    }
  }
  Case full = random_case(1, 4, 2, 128, {256}, 16, true);  // the row's own key lies in a unit that all rows see
  check_early_loads(full), full.check();
  for (const int64_t dim : {64, 128}) {
    Case chunk = random_case(70, 4, 1, dim, {300}, 128, true), long_one = random_case(3, 2, 1, dim, {2500}, 64, false);
    Case lone = random_case(70, 1, 1, dim, {200}, 150, false), two = random_case(9, 4, 2, dim, {60, 300}, 32, false);
    for (Case* c : {&chunk, &long_one, &lone, &two}) check_early_loads(*c), c->check();
    for (const AttentionShape shape : {AttentionShape::kLong, AttentionShape::kPaired}) {
      for (Case* c : {&chunk, &long_one, &lone, &two}) c->shape = shape, check_early_loads(*c), c->check();
    }
  }
}

// Every turn of a sequence belongs to one part, and the parts differ by at most kFirstTurns - 1 turns or one.
template <class F>
void check_parts() {
  for (int i = 0; i < 2000; ++i) {
    const int most = pick(1, kMaxParts), turns = pick(1, 200), keys = turns * F::kTile * F::kCluster - pick(0, 9);
    const int parts = part_count<F>(keys, most);
    require(parts >= 1 && parts <= most, "the number of parts");
    std::vector<int> seen(static_cast<size_t>(turns));
    int least = turns, longest = 0;
    for (int part = 0; part < parts; ++part) {
      int count = 0;
      for (int turn = first_turn<F>(part); turn < turns; turn = next_turn<F>(turn, most)) {
        ++seen[static_cast<size_t>(turn)], ++count;
      }
      least = std::min(least, count), longest = std::max(longest, count);
    }
    require(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }), "a turn is computed once");
    require(least >= 1 && longest - least <= F::kFirstTurns, "the parts have equal lengths");
  }
}

// Results are bitwise identical whether a path's keys are consecutive or scattered over a tree, after any prefix.
void check_independence(int64_t dim, AttentionShape shape) {
  const int64_t heads = 6, kv_heads = 2, capacity = 1500, line = (heads + 2 * kv_heads) * dim;
  const int count = dim == 64 ? pick(1, 1300) : pick(1, 300);
  const auto path_keys = numbers(kv_heads * count * dim), path_values = numbers(kv_heads * count * dim);
  const auto mine = numbers(line), cos = numbers(capacity * dim), sin = numbers(capacity * dim);
  const auto run = [&](int prefix, std::vector<int> places, int others, int spare) {
    Case c{1 + others, 0, 1, heads, kv_heads, capacity, dim, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
    c.draw_numbers();
    c.cos = cos, c.sin = sin;
    std::vector<int> where(static_cast<size_t>(prefix));
    for (int i = 0; i < prefix; ++i) where[static_cast<size_t>(i)] = i;
    where.insert(where.end(), places.begin(), places.end());
    for (int64_t g = 0; g < kv_heads; ++g) {
      for (int i = 0; i < count; ++i) {
        const int64_t to = (g * capacity + where[static_cast<size_t>(i)]) * dim, from = (g * count + i) * dim;
        std::copy_n(path_keys.begin() + from, dim, c.keys.begin() + to);
        std::copy_n(path_values.begin() + from, dim, c.values.begin() + to);
      }
    }
    std::vector<int> free_slots;
    for (int slot = prefix; slot < where.back() + others + 2; ++slot) {
      if (std::find(where.begin(), where.end(), slot) == where.end()) free_slots.push_back(slot);
    }
    std::shuffle(free_slots.begin(), free_slots.end(), dice);
    const int me = pick(0, others);
    int length = 0;
    for (int row = 0; row <= others; ++row) {
      const int slot = row == me ? where.back() : free_slots[static_cast<size_t>(row > me ? row - 1 : row)];
      c.slots.push_back(slot), c.positions.push_back(row == me ? count - 1 : pick(0, 99));
      length = std::max(length, slot + 1);
    }
    length += spare;
    c.kv_len = {length};
    c.width = std::max(length - prefix, 1) + pick(0, 40);
    for (int row = 0; row <= others; ++row) {
      for (int64_t column = 0; column < c.width; ++column) {
        const int64_t slot = length - c.width + column;
        const bool path = std::find(where.begin(), where.end(), slot) != where.end();
        const bool seen = row == me ? path : slot < prefix || pick(0, 2) > 0;
        c.mask.push_back(seen || slot == c.slots[static_cast<size_t>(row)]);
      }
    }
    std::copy(mine.begin(), mine.end(), c.qkv.begin() + me * line);
    c.shape = shape;
    c.run();
    const auto begin = c.out.begin() + me * heads * dim;
    return std::vector<uint16_t>(begin, begin + heads * dim);
  };
  const auto alone = run(count - 1, {count - 1}, 0, 0);
  for (int i = 0; i < 4; ++i) {
    const int prefix = std::max(count - 1 - pick(0, 60), 0), rest = count - prefix;
    std::vector<int> all(static_cast<size_t>(rest + 40)), places;
    for (size_t k = 0; k < all.size(); ++k) all[k] = prefix + static_cast<int>(k);
    std::sample(all.begin(), all.end(), std::back_inserter(places), rest, dice);
    require(run(prefix, places, pick(0, 12), pick(0, 6)) == alone, "a row depends on more than its own keys");
  }
}

}  // namespace

int main() {
  check_parts<ClusterShape<64>>();
  check_parts<LongShape<64>>();
  check_parts<PairedShape<64>>();
  check_parts<BlockShape<64>>();
  check_cases();
  check_padding();
  for (int i = 0; i < 6; ++i) check_independence(i % 2 == 0 ? 64 : 128, static_cast<AttentionShape>(i % 3));
  return 0;
}
