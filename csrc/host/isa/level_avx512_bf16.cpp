// Kernels for AVX-512 with BF16 and VNNI (dot products of bfloat16 pairs and of four bytes). Float32 kernels are those
// of AVX-512.
#include "host/isa/level.h"

#ifdef SWIFTSPEC_X86

#include "host/isa/headers.h"

#define SWIFTSPEC_DOT_BF16 1
#define SWIFTSPEC_DOT_INT8 1
SWIFTSPEC_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma,f16c")

namespace swiftspec::host {
namespace avx512_bf16 {
namespace {
// clang-format off: each header needs those before it
#include "host/isa/vector512.h"
#include "host/isa/vector_x86.h"
#include "host/isa/vector.h"
#include "host/ops/product.h"
#include "host/ops/product_int8.h"
#include "host/ops/tiles.h"
#include "host/ops/linear.h"
#include "host/ops/mixture.h"
#include "host/ops/attention.h"
// clang-format on
}  // namespace
}  // namespace avx512_bf16

Kernels avx512_bf16_kernels() {
  Kernels kernels = avx512_vnni_kernels();
  kernels.peak_bf16 = avx512_bf16::peak;
  kernels.linear_f32 = [](const LinearArgs& args) {
    static const auto others = avx512_vnni_kernels().linear_f32;
    avx512_bf16::has_product(args.weights) ? avx512_bf16::linear<float>(args) : others(args);
  };
  kernels.mixture_f32 = [](const MixtureArgs& args) {
    static const auto others = avx512_vnni_kernels().mixture_f32;
    avx512_bf16::has_products(args.mlp) ? avx512_bf16::mixture<float>(args) : others(args);
  };
  kernels.linear_bf16 = avx512_bf16::linear<uint16_t>;
  kernels.mixture_bf16 = avx512_bf16::mixture<uint16_t>;
  kernels.attention_bf16 = avx512_bf16::attention<uint16_t>;
  kernels.attention_mixed = avx512_bf16::attention<float, uint16_t>;
  return kernels;
}

}  // namespace swiftspec::host

SWIFTSPEC_END_TARGET

#endif
