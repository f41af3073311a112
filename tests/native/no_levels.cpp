// What a driver is linked with in place of levels that it does not run: they take long to compile.
#include "host/isa/level.h"

namespace swiftspec::host {

[[gnu::weak]] Kernels avx2_kernels() { return {}; }
[[gnu::weak]] Kernels avx_vnni_kernels() { return {}; }
[[gnu::weak]] Kernels avx512_kernels() { return {}; }
[[gnu::weak]] Kernels avx512_vnni_kernels() { return {}; }
[[gnu::weak]] Kernels avx512_bf16_kernels() { return {}; }

}  // namespace swiftspec::host
