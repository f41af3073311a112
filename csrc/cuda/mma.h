// Fragments of mma.m16n8k16 and their products, for host code and device code (see common/warp.h).
#pragma once

#include <cstdint>

#include "common/bfloat16.h"
#include "common/warp.h"
#include "cuda/fragment.h"

#ifdef __CUDA_ARCH__
#include "cuda/ptx.cuh"
#endif

namespace swiftspec::mma {

using A = warp::PerLane<warp::Regs<4, uint32_t>>;  // 16 x 16 of bfloat16, two to a register
using B = warp::PerLane<warp::Regs<2, uint32_t>>;  // 16 x 8
using C = warp::PerLane<warp::Regs<4, float>>;     // 16 x 8

// bf16::nearest, in one instruction on a device.
SWIFTSPEC_HD uint16_t nearest_bf16(float x) {
#ifdef __CUDA_ARCH__
  return static_cast<uint16_t>(ptx::bf16_pair(x, 0));
#else
  return bf16::nearest(x);
#endif
}

SWIFTSPEC_HD void multiply(C& c, const A& a, const B& b) {
#ifdef __CUDA_ARCH__
  const auto& left = a.value.r;
  ptx::mma(c.value.r, left[0], left[1], left[2], left[3], b.value.r[0], b.value.r[1]);
#else
  using namespace fragment;
  float left[16][16], right[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      left[a_row(lane, i)][a_column(lane, i)] = bf16::widen(static_cast<uint16_t>(a(lane).r[i]));
      left[a_row(lane, i)][a_column(lane, i) + 1] = bf16::widen(static_cast<uint16_t>(a(lane).r[i] >> 16));
    }
    for (int i = 0; i < 2; ++i) {
      right[b_row(lane, i)][b_column(lane)] = bf16::widen(static_cast<uint16_t>(b(lane).r[i]));
      right[b_row(lane, i) + 1][b_column(lane)] = bf16::widen(static_cast<uint16_t>(b(lane).r[i] >> 16));
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      float sum = c(lane).r[i];
      for (int k = 0; k < 16; ++k) sum += left[c_row(lane, i)][k] * right[k][c_column(lane, i)];
      c(lane).r[i] = sum;
    }
  }
#endif
}

// ldmatrix.x4: loads four 8 x 8 matrices. Lane l passes the address of row l % 8 of matrix l / 8. Register i receives
// row lane / 4, columns lane % 4 * 2 and the next, of matrix i, or of its transpose if kTransposed.
template <bool kTransposed>
SWIFTSPEC_HD void load_matrices(A& a, const warp::PerLane<const uint16_t*>& rows) {
#ifdef __CUDA_ARCH__
  ptx::ldmatrix_x4<kTransposed>(a.value.r, rows.value);
#else
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4, column = lane % 4 * 2;
      const uint16_t low = kTransposed ? rows(8 * i + column)[row] : rows(8 * i + row)[column];
      const uint16_t high = kTransposed ? rows(8 * i + column + 1)[row] : rows(8 * i + row)[column + 1];
      a(lane).r[i] = low | static_cast<uint32_t>(high) << 16;
    }
  }
#endif
}

}  // namespace swiftspec::mma
