// RMSNorm of query and key heads.
#include <cuda_runtime.h>

#include "common/bfloat16.h"
#include "common/ieee.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"

namespace swiftspec::cuda {
namespace {

constexpr int kWarps = 8;

// Consecutive elements of a head that one lane of a warp holds.
template <int kDim>
struct alignas(kDim / 16) Piece {
  uint16_t x[kDim / 32];
};

// A warp normalises one head of a row; grid: (heads / kWarps, rows). Rounds where the reference rounds.
template <int kDim>
__global__ void __launch_bounds__(32 * kWarps)
    head_norm_kernel(uint16_t* qkv, const uint16_t* weight, float eps, int heads, int64_t width) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int head = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (head >= heads) return;
  const int at = head * kDim + static_cast<int>(threadIdx.x) % 32 * (kDim / 32);
  auto* place = reinterpret_cast<Piece<kDim>*>(qkv + blockIdx.y * width + at);
  const auto factors = *reinterpret_cast<const Piece<kDim>*>(weight + at);
  Piece<kDim> piece = *place;
  float squares = 0;
  for (const uint16_t x : piece.x) squares = fmaf(bf16::widen(x), bf16::widen(x), squares);
  for (int other = 16; other > 0; other /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, other);
  const float scale = __frsqrt_rn(ieee::add(ieee::div(squares, static_cast<float>(kDim)), eps));
  for (int i = 0; i < kDim / 32; ++i) {
    const float normed = bf16::widen(bf16::nearest(ieee::mul(bf16::widen(piece.x[i]), scale)));
    piece.x[i] = bf16::nearest(ieee::mul(normed, bf16::widen(factors.x[i])));
  }
  *place = piece;
}

}  // namespace

void prepare_head_norm() {
  allow_shared_memory("head_norm", head_norm_kernel<64>, 0);
  allow_shared_memory("head_norm", head_norm_kernel<128>, 0);
}

void head_norm(void* qkv, const void* weight, float eps, int64_t rows, int64_t heads, int64_t width, int64_t dim,
               Stream stream) {
  if (rows == 0) return;
  const dim3 grid(static_cast<unsigned>((heads + kWarps - 1) / kWarps), static_cast<unsigned>(rows));
  const Launch how{.grid = grid, .threads = 32 * kWarps, .early = true};
  launch("head_norm", dim == 64 ? head_norm_kernel<64> : head_norm_kernel<128>, how, stream,
         static_cast<uint16_t*>(qkv), static_cast<const uint16_t*>(weight), eps, static_cast<int>(heads), width);
}

}  // namespace swiftspec::cuda
