// Kernels for NEON, which every aarch64 CPU has.
#include "host/isa/level.h"

#ifdef SWIFTSPEC_NEON

#include "host/isa/headers.h"

namespace swiftspec::host {
namespace neon {
namespace {
// clang-format off: each header needs those before it
#include "host/isa/vector_neon.h"
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
}  // namespace neon

Kernels neon_kernels() {
  return {neon::peak,
          neon::peak,
          neon::linear<float>,
          neon::linear<uint16_t>,
          neon::mixture<float>,
          neon::mixture<uint16_t>,
          neon::add_to<float>,
          neon::add_to<uint16_t>,
          neon::norm_add<float>,
          neon::norm_add<uint16_t>,
          neon::apply_gates<float>,
          neon::apply_gates<uint16_t>,
          neon::multiply<float>,
          neon::multiply<uint16_t>,
          neon::attention<float>,
          neon::attention<uint16_t>,
          neon::attention<float, uint16_t>,
          neon::projection_sums<float>,
          neon::projection_sums<uint16_t>,
          neon::multiply_sigmoid<float>,
          neon::multiply_sigmoid<uint16_t>,
          neon::gated_delta<float>,
          neon::gated_delta<uint16_t>,
          neon::fold_delta,
          neon::gumbel,
          neon::gumbel_row,
          neon::draw,
          neon::children,
          neon::log_probs,
          neon::draw_keyed,
          neon::draw_filtered,
          neon::filter_scores};
}

}  // namespace swiftspec::host

#endif
