// Kernels for AVX-512 without bfloat16 arithmetic: loads widen bfloat16 to float32.
#include "host/isa/level.h"

#ifdef SWIFTSPEC_X86

#include "host/isa/headers.h"

SWIFTSPEC_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")

namespace swiftspec::host {
namespace avx512 {
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
#include "host/ops/delta.h"
#include "host/ops/sampling.h"
#include "host/ops/filters.h"
// clang-format on
}  // namespace
}  // namespace avx512

Kernels avx512_kernels() {
  return {avx512::peak,
          avx512::peak,
          avx512::linear<float>,
          avx512::linear<uint16_t>,
          avx512::mixture<float>,
          avx512::mixture<uint16_t>,
          avx512::add_to<float>,
          avx512::add_to<uint16_t>,
          avx512::norm_add<float>,
          avx512::norm_add<uint16_t>,
          avx512::apply_gates<float>,
          avx512::apply_gates<uint16_t>,
          avx512::multiply<float>,
          avx512::multiply<uint16_t>,
          avx512::attention<float>,
          avx512::attention<uint16_t>,
          avx512::attention<float, uint16_t>,
          avx512::projection_sums<float>,
          avx512::projection_sums<uint16_t>,
          avx512::multiply_sigmoid<float>,
          avx512::multiply_sigmoid<uint16_t>,
          avx512::gated_delta<float>,
          avx512::gated_delta<uint16_t>,
          avx512::fold_delta,
          avx512::gumbel,
          avx512::gumbel_row,
          avx512::draw,
          avx512::children,
          avx512::log_probs,
          avx512::draw_keyed,
          avx512::draw_filtered,
          avx512::filter_scores};
}

}  // namespace swiftspec::host

SWIFTSPEC_END_TARGET

#endif
