// Checks of the delta cache of a model.
#pragma once

#include "bind/arguments.h"
#include "host/decoder/delta_cache.h"

namespace swiftspec::binding {

inline void check_shape(const host::DeltaShape& shape) {
  constexpr int64_t kUnit = 16;  // elements
  check(shape.k_heads >= 1 && shape.v_heads >= shape.k_heads && shape.v_heads % shape.k_heads == 0,
        "value heads must be a multiple of key heads");
  check(shape.k_dim >= kUnit && shape.k_dim % kUnit == 0 && shape.v_dim >= kUnit && shape.v_dim % kUnit == 0,
        "the heads of a delta layer must have a multiple of 16 elements");
  check(shape.conv_width >= 1 && shape.conv_width <= host::kFoldPositions,
        "the convolution must read between 1 and 32 positions");
}

}  // namespace swiftspec::binding
