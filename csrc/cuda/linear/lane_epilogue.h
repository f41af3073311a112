// Epilogue of a projection per lane: bias, SwiGLU, residual, LL lines, and the stores. For host code and device code;
// tests/native/cuda_tiles.cpp runs it.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/linear/tiles.h"

namespace swiftspec::cuda {

struct Outputs {
  const float* bias;         // [n], or null
  const uint16_t* residual;  // [rows, n], or null
  uint16_t* out;             // [rows, n], with swiglu [rows, n / 2]
  float* logits;             // [rows, n] instead of out, or null
  bool swiglu;
  int32_t rows;
};

// A lane's sums of a unit (eight rows of a strip): for two rows, two neighbouring `first` outputs and two neighbouring
// `second` outputs.
struct Unit {
  int strip, j;
  float value[2][2][2];  // [second][row][neighbour]
};

// Sets the lane's four sums of fragment f, in the order of the MMA registers.
SWIFTSPEC_HD void set_sums(Unit& unit, int f, const float (&sums)[4]) {
  SWIFTSPEC_UNROLL
  for (int i = 0; i < 4; ++i) unit.value[i / 2][i % 2][f] = sums[i];
}

// Number of outputs from `pair` on that exist among the first (second = 0) or second outputs.
SWIFTSPEC_HD int64_t outputs_left(const tiles::Tiling& t, int64_t pair, int second) {
  return second == 0 ? t.half - pair : t.n - t.half - pair;
}

// Stores two neighbouring values, of which the first `count` exist.
SWIFTSPEC_HD void store_pair(uint16_t* to, int64_t count, float a, float b) {
  if (count >= 2 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = tiles::pair_of(a, b);
    return;
  }
  if (count >= 1) to[0] = static_cast<uint16_t>(tiles::pair_of(a, b));
  if (count >= 2) to[1] = static_cast<uint16_t>(tiles::pair_of(b, a));
}

SWIFTSPEC_HD void store_pair(float* to, int64_t count, float a, float b) {
  if (count >= 1) to[0] = a;
  if (count >= 2) to[1] = b;
}

// Stores outputs `output` and the next of a row. If there is a residual, the product is rounded and added to it.
SWIFTSPEC_HD void store_outputs(const tiles::Tiling& t, const Outputs& to, int64_t row, int64_t output, int64_t count,
                                float a, float b) {
  const int64_t at = row * t.n + output;
  if (to.logits != nullptr) return store_pair(to.logits + at, count, a, b);
  if (to.residual != nullptr) {
    if (count >= 1) a = tiles::rounded(a) + ll::Bfloat16::widen(to.residual[at]);
    if (count >= 2) b = tiles::rounded(b) + ll::Bfloat16::widen(to.residual[at + 1]);
  }
  store_pair(to.out + at, count, a, b);
}

// Two neighbouring values, of which the first `count` exist; zeros for the others.
SWIFTSPEC_HD uint32_t load_pair(const uint16_t* from, int64_t count) {
  if (count >= 2 && reinterpret_cast<uintptr_t>(from) % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
  const uint32_t first = count >= 1 ? from[0] : 0, second = count >= 2 ? from[1] : 0;
  return second << 16 | first;
}

// The residual of a unit, so that it can be loaded before the sums are there: pairs of neighbours.
struct ResidualPairs {
  uint32_t pair[2][2];  // [second][row]
};
SWIFTSPEC_HD ResidualPairs load_residual(const tiles::Tiling& t, const Outputs& to, int lane, const Unit& unit) {
  const int64_t pair = tiles::pair_of_outputs(unit.strip, lane);
  ResidualPairs found{};
  SWIFTSPEC_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int64_t row = 8 * unit.j + fragment::c_column(lane, i % 2), output = tiles::output_of_pair(t, pair, i / 2);
    if (row < to.rows) found.pair[i / 2][i % 2] = load_pair(to.residual + row * t.n + output, outputs_left(t, pair, i / 2));
  }
  return found;
}

// Rounds the product and adds its residual, as store_outputs does.
SWIFTSPEC_HD void add_residual(const ResidualPairs& residual, Unit& unit) {
  SWIFTSPEC_UNROLL
  for (int i = 0; i < 4; ++i) {
    float(&v)[2] = unit.value[i / 2][i % 2];
    const uint32_t pair = residual.pair[i / 2][i % 2];
    v[0] = tiles::rounded(v[0]) + tiles::low(pair);
    v[1] = tiles::rounded(v[1]) + tiles::high(pair);
  }
}

SWIFTSPEC_HD float silu_mul(float gate, float up) {
  gate = tiles::rounded(gate);
#if defined(__CUDA_ARCH__)
  const float share = __fdividef(1.0f, 1.0f + __expf(-gate));
#else
  const float share = 1.0f / (1.0f + std::exp(-gate));
#endif
  return tiles::rounded(gate * share) * tiles::rounded(up);
}

// Adds the bias, if there is one.
SWIFTSPEC_HD void add_bias(const tiles::Tiling& t, const Outputs& to, int lane, Unit& unit) {
  if (to.bias == nullptr) return;
  const int64_t pair = tiles::pair_of_outputs(unit.strip, lane);
  SWIFTSPEC_UNROLL
  for (int i = 0; i < 4; ++i) {  // [second][neighbour]
    if (i % 2 >= outputs_left(t, pair, i / 2)) continue;
    const float bias = to.bias[tiles::output_of_pair(t, pair, i / 2) + i % 2];
    unit.value[i / 2][0][i % 2] += bias;
    unit.value[i / 2][1][i % 2] += bias;
  }
}

SWIFTSPEC_HD void store_unit(const tiles::Tiling& t, const Outputs& to, int lane, const Unit& unit) {
  const int64_t pair = tiles::pair_of_outputs(unit.strip, lane), half = t.half;
  SWIFTSPEC_UNROLL
  for (int e = 0; e < 2; ++e) {
    const int64_t row = 8 * unit.j + fragment::c_column(lane, e);
    if (row >= to.rows) continue;
    const float(&first)[2] = unit.value[0][e];
    const float(&second)[2] = unit.value[1][e];
    if (to.swiglu) {
      const float a = silu_mul(first[0], second[0]), b = silu_mul(first[1], second[1]);
      store_pair(to.out + row * half + pair, half - pair, a, b);
    } else {
      store_outputs(t, to, row, tiles::output_of_pair(t, pair, 0), outputs_left(t, pair, 0), first[0], first[1]);
      store_outputs(t, to, row, tiles::output_of_pair(t, pair, 1), outputs_left(t, pair, 1), second[0], second[1]);
    }
  }
}

// The payload of one of a lane's two LL lines: a pair of outputs, rounded, for both rows.
SWIFTSPEC_HD uint64_t line_of(const Unit& unit, int second) {
  const float(&v)[2][2] = unit.value[second];
  return static_cast<uint64_t>(tiles::pair_of(v[1][0], v[1][1])) << 32 | tiles::pair_of(v[0][0], v[0][1]);
}

SWIFTSPEC_HD void set_line(Unit& unit, int second, uint64_t payload) {
  SWIFTSPEC_UNROLL
  for (int i = 0; i < 4; ++i) {
    unit.value[second][i / 2][i % 2] = ll::Bfloat16::widen(static_cast<uint16_t>(payload >> 16 * i));
  }
}

}  // namespace swiftspec::cuda
