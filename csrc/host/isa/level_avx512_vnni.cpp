// Kernels for AVX-512 with VNNI (dot products of four bytes). All except `linear` and `mixture` are those of AVX-512.
#include "host/isa/level.h"

#ifdef SWIFTSPEC_X86

#include "host/isa/headers.h"

#define SWIFTSPEC_DOT_INT8 1
SWIFTSPEC_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")

namespace swiftspec::host {
namespace avx512_vnni {
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
// clang-format on
}  // namespace
}  // namespace avx512_vnni

Kernels avx512_vnni_kernels() {
  Kernels kernels = avx512_kernels();
  kernels.linear_f32 = avx512_vnni::linear<float>;
  kernels.linear_bf16 = avx512_vnni::linear<uint16_t>;
  kernels.mixture_f32 = avx512_vnni::mixture<float>;
  kernels.mixture_bf16 = avx512_vnni::mixture<uint16_t>;
  return kernels;
}

}  // namespace swiftspec::host

SWIFTSPEC_END_TARGET

#endif
