// Kernels for AVX2 and FMA.
#include "host/isa/level.h"

#ifdef SWIFTSPEC_X86

#include "host/isa/headers.h"

SWIFTSPEC_BEGIN_TARGET("avx2,fma,f16c")

namespace swiftspec::host {
namespace avx2 {
namespace {
// clang-format off: each header needs those before it
#include "host/isa/vector256.h"
#include "host/isa/vector_x86.h"
#include "host/isa/vector.h"
#include "host/ops/product.h"
#include "host/ops/product_int8.h"
#include "host/ops/tiles.h"
#include "host/ops/linear.h"
#include "host/ops/mixture.h"
#include "host/ops/attention.h"
#include "host/ops/delta.h"
#include "host/ops/sampling.h"
#include "host/ops/filters.h"
// clang-format on
}  // namespace
}  // namespace avx2

Kernels avx2_kernels() {
  return {avx2::peak,
          avx2::peak,
          avx2::linear<float>,
          avx2::linear<uint16_t>,
          avx2::mixture<float>,
          avx2::mixture<uint16_t>,
          avx2::add_to<float>,
          avx2::add_to<uint16_t>,
          avx2::norm_add<float>,
          avx2::norm_add<uint16_t>,
          avx2::apply_gates<float>,
          avx2::apply_gates<uint16_t>,
          avx2::multiply<float>,
          avx2::multiply<uint16_t>,
          avx2::attention<float>,
          avx2::attention<uint16_t>,
          avx2::attention<float, uint16_t>,
          avx2::projection_sums<float>,
          avx2::projection_sums<uint16_t>,
          avx2::multiply_sigmoid<float>,
          avx2::multiply_sigmoid<uint16_t>,
          avx2::gated_delta<float>,
          avx2::gated_delta<uint16_t>,
          avx2::fold_delta,
          avx2::gumbel,
          avx2::gumbel_row,
          avx2::draw,
          avx2::children,
          avx2::log_probs,
          avx2::draw_keyed,
          avx2::draw_filtered,
          avx2::filter_scores};
}

}  // namespace swiftspec::host

SWIFTSPEC_END_TARGET

#endif
