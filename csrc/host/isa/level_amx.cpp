// Kernels for AVX-512 with BF16 and VNNI, and products on the matrix tiles of AMX. All except `linear`, `mixture` and
// `attention` with bfloat16 caches are those of AVX-512 BF16.
#include "host/isa/level.h"

#ifdef SWIFTSPEC_X86

#include "host/isa/headers.h"

#define SWIFTSPEC_DOT_BF16 1
#define SWIFTSPEC_DOT_INT8 1
#define SWIFTSPEC_TILES 1
SWIFTSPEC_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-int8,amx-bf16,fma,f16c")

namespace swiftspec::host {
namespace amx {
namespace {
// clang-format off: each header needs those before it
#include "host/isa/vector512.h"
#include "host/isa/vector_x86.h"
#include "host/isa/vector.h"
#include "host/isa/tile_registers.h"
#include "host/ops/product.h"
#include "host/ops/product_int8.h"
#include "host/ops/product_tiles.h"
#include "host/ops/tiles.h"
#include "host/ops/linear.h"
#include "host/ops/mixture.h"
#include "host/ops/attention.h"
// clang-format on
}  // namespace
}  // namespace amx

Kernels amx_kernels() {
  Kernels kernels = avx512_bf16_kernels();
  kernels.linear_f32 = [](const LinearArgs& args) {
    static const auto others = avx512_vnni_kernels().linear_f32;
    amx::has_product(args.weights) ? amx::linear<float>(args) : others(args);
  };
  kernels.mixture_f32 = [](const MixtureArgs& args) {
    static const auto others = avx512_vnni_kernels().mixture_f32;
    amx::has_products(args.mlp) ? amx::mixture<float>(args) : others(args);
  };
  kernels.linear_bf16 = amx::linear<uint16_t>;
  kernels.mixture_bf16 = amx::mixture<uint16_t>;
  kernels.attention_bf16 = [](const AttentionArgs& args) {
    static const auto without_tiles = avx512_bf16_kernels().attention_bf16;
    args.dim % amx::kBf16TileInputs == 0 ? amx::attention<uint16_t>(args) : without_tiles(args);
  };
  kernels.attention_mixed = [](const AttentionArgs& args) {
    static const auto without_tiles = avx512_bf16_kernels().attention_mixed;
    args.dim % amx::kBf16TileInputs == 0 ? amx::attention<float, uint16_t>(args) : without_tiles(args);
  };
  return kernels;
}

}  // namespace swiftspec::host

SWIFTSPEC_END_TARGET

#endif
