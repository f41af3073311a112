// The products with matrix tiles (host/ops/product_tiles.h) on emulated tile registers and AVX2 vectors. Those of
// quantised rows are bitwise those of the level avx2; those of bfloat16 rows are close to them, and a row's bits do not
// depend on the other rows. Exits with 0, or prints the case that differs.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "host/isa/headers.h"
#include "host/isa/level.h"

#define SWIFTSPEC_TILES 1
SWIFTSPEC_BEGIN_TARGET("avx2,fma,f16c")

namespace swiftspec::host {
namespace emulated {
namespace {
// clang-format off: each header needs those before it
#include "host/isa/vector256.h"
#include "host/isa/vector_x86.h"
#include "host/isa/vector.h"
#include "emulated_tiles.h"
#include "host/ops/product.h"
#include "host/ops/product_int8.h"
#include "host/ops/product_tiles.h"
#include "host/ops/tiles.h"
#include "host/ops/linear.h"
#include "host/ops/attention.h"
// clang-format on

void linear_f32(const LinearArgs& args) { linear<float>(args); }
void linear_bf16(const LinearArgs& args) { linear<uint16_t>(args); }
void attention_bf16(const AttentionArgs& args) { attention<uint16_t>(args); }
}  // namespace
}  // namespace emulated
}  // namespace swiftspec::host

SWIFTSPEC_END_TARGET

using namespace swiftspec::host;

namespace {

std::mt19937 dice(11);

enum class Zeros { per_group, default_value, minima };

template <class T>
std::vector<T> random_values(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<T> out(static_cast<size_t>(count));
  for (T& value : out) {
    const float x = normal(dice);
    if constexpr (sizeof(T) == 4) {
      value = x;
    } else {
      std::memcpy(&value, reinterpret_cast<const char*>(&x) + 2, 2);
    }
  }
  return out;
}

std::vector<uint8_t> random_bytes(int64_t count, unsigned below) {
  std::vector<uint8_t> out(static_cast<size_t>(count));
  for (uint8_t& value : out) value = static_cast<uint8_t>(dice() % below);
  return out;
}

template <class T>
void compare(Format format, Zeros zeros, int64_t rows, int64_t k, int64_t n, int64_t group, Gate gate) {
  const int64_t blocks = (n + 15) / 16, groups = blocks * 16 * (k / group);
  const auto data = random_bytes(blocks * 16 * k / (format == Format::int8 ? 1 : 2), 256);
  const auto zero_points = random_bytes(groups, 16);
  const auto scales = random_values<float>(groups), minima = random_values<float>(groups);
  const auto x = random_values<T>(rows * k), residual = random_values<T>(rows * n);
  const bool minimum = format == Format::int4 && zeros == Zeros::minima;
  const Weights weights{format, data.data(), scales.data(), ScaleType::f32,
                        format == Format::int4 && zeros == Zeros::per_group ? zero_points.data() : nullptr,
                        minimum ? minima.data() : nullptr, nullptr, nullptr, nullptr, nullptr, k, n, group, true};
  const auto run = [&](void (*linear)(const LinearArgs&)) {
    std::vector<T> out(static_cast<size_t>(rows * (gate == Gate::none ? n : n / 2)));
    LinearArgs args;
    args.weights = &weights, args.x = x.data(), args.rows = rows, args.out = out.data(), args.gate = gate;
    if (gate == Gate::none) args.residual = residual.data();
    linear(args);
    return out;
  };
  const Kernels avx2 = avx2_kernels();
  const auto want = run(sizeof(T) == 4 ? avx2.linear_f32 : avx2.linear_bf16);
  const auto got = run(sizeof(T) == 4 ? emulated::linear_f32 : emulated::linear_bf16);
  if (std::memcmp(want.data(), got.data(), want.size() * sizeof(T)) == 0) return;
  std::fprintf(stderr, "format %d zeros %d rows %d k %d n %d group %d gate %d\n", static_cast<int>(format),
               static_cast<int>(zeros), static_cast<int>(rows), static_cast<int>(k), static_cast<int>(n),
               static_cast<int>(group), static_cast<int>(gate));
  std::exit(1);
}

float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

bool close(const std::vector<uint16_t>& want, const std::vector<uint16_t>& got) {
  for (size_t i = 0; i < want.size(); ++i) {
    const float difference = bf16_value(want[i]) - bf16_value(got[i]), size = bf16_value(want[i]);
    if (!(difference * difference <= 1e-3f + 1e-3f * size * size)) return false;
  }
  return true;
}

void compare_bf16(int64_t rows, int64_t k, int64_t n, Gate gate) {
  const auto data = random_values<uint16_t>((n + 15) / 16 * 16 * k), x = random_values<uint16_t>(rows * k);
  const Weights weights{Format::bf16, data.data(), nullptr, ScaleType::f32, nullptr, nullptr, nullptr, nullptr, nullptr,
                        nullptr, k, n, 0, false};
  const int64_t outputs = gate == Gate::none ? n : n / 2;
  const auto run = [&](void (*linear)(const LinearArgs&), int64_t first, int64_t count) {
    std::vector<uint16_t> out(static_cast<size_t>(count * outputs));
    LinearArgs args;
    args.weights = &weights, args.x = x.data() + first * k, args.rows = count, args.out = out.data(), args.gate = gate;
    linear(args);
    return out;
  };
  const auto want = run(avx2_kernels().linear_bf16, 0, rows), got = run(emulated::linear_bf16, 0, rows);
  bool ok = close(want, got);
  for (const int64_t row : {int64_t{0}, rows / 2, rows - 1}) {
    const auto alone = run(emulated::linear_bf16, row, 1);
    ok = ok && std::memcmp(alone.data(), got.data() + row * outputs, alone.size() * sizeof(uint16_t)) == 0;
  }
  if (ok) return;
  std::fprintf(stderr, "bf16 rows %d k %d n %d gate %d\n", static_cast<int>(rows), static_cast<int>(k),
               static_cast<int>(n), static_cast<int>(gate));
  std::exit(1);
}

// Rows of a tree after `prefix` slots: row r sees the prefix and some rows before it. Alone, with its keys in other
// slots, a row has the same bits.
void compare_attention(int64_t rows, int64_t prefix, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window) {
  const int64_t capacity = prefix + rows + 7, width = (heads + 2 * kv_heads) * dim, length = prefix + rows;
  const auto qkv = random_values<uint16_t>(rows * width), cos = random_values<uint16_t>(rows * dim),
             sin = random_values<uint16_t>(rows * dim);
  const auto keys = random_values<uint16_t>(kv_heads * capacity * dim),
             values = random_values<uint16_t>(kv_heads * capacity * dim);
  std::vector<uint8_t> mask(static_cast<size_t>(rows * rows));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i <= r; ++i) mask[static_cast<size_t>(r * rows + i)] = i == r || dice() % 3 != 0;
  }
  struct Run {
    std::vector<uint16_t> keys, values, out;
  };
  const auto run = [&](void (*attention)(const AttentionArgs&), const std::vector<int64_t>& which,
                       const std::vector<int64_t>& slots, const std::vector<uint8_t>& seen, int64_t end, Run cache) {
    const auto rows_of = [&](const std::vector<uint16_t>& all, int64_t each) {
      std::vector<uint16_t> some;
      for (const int64_t r : which) some.insert(some.end(), all.begin() + r * each, all.begin() + (r + 1) * each);
      return some;
    };
    const auto q = rows_of(qkv, width), c = rows_of(cos, dim), s = rows_of(sin, dim);
    const int64_t count = static_cast<int64_t>(which.size());
    cache.out.resize(static_cast<size_t>(count * heads * dim));
    AttentionArgs args{q.data(), c.data(), s.data(), slots.data(), seen.data(), cache.keys.data(), cache.values.data(),
                       cache.out.data(), count, heads, kv_heads, capacity, end, end - prefix, dim, width, {}, {}};
    args.options.window = window;
    attention(args);
    return cache;
  };
  std::vector<int64_t> all, slots;
  for (int64_t r = 0; r < rows; ++r) all.push_back(r), slots.push_back(prefix + r);
  const Run start{keys, values, {}};
  const Run want = run(avx2_kernels().attention_bf16, all, slots, mask, length, start);
  const Run got = run(emulated::attention_bf16, all, slots, mask, length, start);
  bool ok = close(want.out, got.out);
  for (const int64_t r : {int64_t{0}, rows / 2, rows - 1}) {
    // the keys that row r sees move to the slots from prefix + 1 on
    Run moved = got;
    std::vector<uint8_t> seen{0};
    for (int64_t i = 0; i < r; ++i) {
      if (mask[static_cast<size_t>(r * rows + i)] == 0) continue;
      for (int64_t g = 0; g < kv_heads; ++g) {
        const int64_t to = (g * capacity + prefix + static_cast<int64_t>(seen.size())) * dim;
        const int64_t from = (g * capacity + prefix + i) * dim;
        std::memcpy(moved.keys.data() + to, got.keys.data() + from, static_cast<size_t>(2 * dim));
        std::memcpy(moved.values.data() + to, got.values.data() + from, static_cast<size_t>(2 * dim));
      }
      seen.push_back(1);
    }
    seen.push_back(1);
    const int64_t slot = prefix + static_cast<int64_t>(seen.size()) - 1;
    const Run alone = run(emulated::attention_bf16, {r}, {slot}, seen, slot + 1, moved);
    const size_t row_bytes = static_cast<size_t>(heads * dim) * sizeof(uint16_t);
    ok = ok && std::memcmp(alone.out.data(), got.out.data() + r * heads * dim, row_bytes) == 0;
  }
  if (ok) return;
  std::fprintf(stderr, "attention rows %d prefix %d heads %d kv_heads %d dim %d window %d\n", static_cast<int>(rows),
               static_cast<int>(prefix), static_cast<int>(heads), static_cast<int>(kv_heads), static_cast<int>(dim),
               static_cast<int>(window));
  std::exit(1);
}

}  // namespace

int main() {
  set_threads(2);
  for (const Format format : {Format::int4, Format::int8, Format::float4}) {
    for (const Zeros zeros : {Zeros::per_group, Zeros::default_value, Zeros::minima}) {
      if (format != Format::int4 && zeros != Zeros::per_group) continue;
      for (const int64_t group : {16, 32, 48, 64, 80, 128, 256}) {
        for (const int64_t rows : {5, 6, 12, 16, 17, 32, 33, 131, 270}) {
          compare<uint16_t>(format, zeros, rows, 3 * group, 56, group, Gate::none);
        }
        compare<float>(format, zeros, 13, 2 * group, 144, group, Gate::none);
        compare<uint16_t>(format, zeros, 13, 2 * group, 2 * 88, group, Gate::silu);
      }
    }
  }
  for (const int64_t rows : {1, 2, 15, 16, 17, 40, 131}) {
    for (const int64_t k : {24, 32, 96}) compare_bf16(rows, k, 88, Gate::none);
    compare_bf16(rows, 64, 2 * 88, Gate::silu);
  }
  for (const int64_t prefix : {0, 5, 31, 32, 100}) {
    for (const int64_t window : {0, 20, 47}) {
      compare_attention(1, prefix, 4, 2, 64, window);
      compare_attention(7, prefix, 4, 2, 32, window);
      compare_attention(21, prefix, 18, 1, 128, window);
      compare_attention(70, prefix, 4, 2, 32, window);  // as a prompt
    }
  }
  return 0;
}
