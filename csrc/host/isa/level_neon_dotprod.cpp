// Kernels for NEON with dot products of four bytes. All except `linear` and `mixture` are those of NEON.
#include "host/isa/level.h"

#ifdef SWIFTSPEC_NEON

#include "host/isa/headers.h"

#define SWIFTSPEC_DOT_INT8 1
SWIFTSPEC_BEGIN_TARGET("arch=armv8.2-a+dotprod")

namespace swiftspec::host {
namespace neon_dotprod {
namespace {
// clang-format off: each header needs those before it
#include "host/isa/vector_neon.h"
#include "host/isa/vector.h"
#include "host/ops/product.h"
#include "host/ops/product_int8.h"
#include "host/ops/tiles.h"
#include "host/ops/linear.h"
#include "host/ops/mixture.h"
// clang-format on
}  // namespace
}  // namespace neon_dotprod

Kernels neon_dotprod_kernels() {
  Kernels kernels = neon_kernels();
  kernels.linear_f32 = neon_dotprod::linear<float>;
  kernels.linear_bf16 = neon_dotprod::linear<uint16_t>;
  kernels.mixture_f32 = neon_dotprod::mixture<float>;
  kernels.mixture_bf16 = neon_dotprod::mixture<uint16_t>;
  return kernels;
}

}  // namespace swiftspec::host

SWIFTSPEC_END_TARGET

#endif
