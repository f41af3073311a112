// Stubs of ISA levels that a driver does not run, since these take long to compile.
#include "host/isa/level.h"

namespace swiftspec::host {

[[gnu::weak]] Kernels avx2_kernels() { return {}; }
[[gnu::weak]] Kernels avx_vnni_kernels() { return {}; }
[[gnu::weak]] Kernels avx512_kernels() { return {}; }
[[gnu::weak]] Kernels avx512_vnni_kernels() { return {}; }
[[gnu::weak]] Kernels avx512_bf16_kernels() { return {}; }
[[gnu::weak]] Kernels amx_kernels() { return {}; }
[[gnu::weak]] Kernels neon_kernels() { return {}; }
[[gnu::weak]] Kernels neon_dotprod_kernels() { return {}; }

}  // namespace swiftspec::host
