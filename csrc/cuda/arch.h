// Features of the architecture that a kernel is compiled for; used by ptx.cuh and by the emulated GPU (tests/simt).
#pragma once

#if defined(__CUDA_ARCH__)
#define SWIFTSPEC_ARCH __CUDA_ARCH__
#elif !defined(SWIFTSPEC_ARCH)
#define SWIFTSPEC_ARCH 900  // for tests on a CPU; launchers query the device instead
#endif

namespace swiftspec::ptx {

// Bulk copies (cp.async.bulk) by one thread, and programmatic dependent launch. Without them each lane of a warp copies
// 16 bytes at a time.
constexpr bool kBulk = SWIFTSPEC_ARCH >= 900;
constexpr int kLoaders = kBulk ? 1 : 32;  // lanes of a warp that share one copy

// Thread-block clusters with distributed shared memory; the host checks Device::has_clusters().
constexpr bool kClusters = SWIFTSPEC_ARCH >= 900 && SWIFTSPEC_ARCH < 1200;

// Asynchronous products of warpgroups (wgmma), which only compute capability 9.0 has; the host checks
// Device::has_wgmma().
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kWgmma = true;
#else
constexpr bool kWgmma = false;
#endif
#else
constexpr bool kWgmma = SWIFTSPEC_ARCH == 900;
#endif

}  // namespace swiftspec::ptx
