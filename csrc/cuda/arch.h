// What the GPUs that a kernel is compiled for can do; ptx.cuh, and where a GPU is emulated tests/simt, go by it.
#pragma once

#if defined(__CUDA_ARCH__)
#define SWIFTSPEC_ARCH __CUDA_ARCH__
#elif !defined(SWIFTSPEC_ARCH)
#define SWIFTSPEC_ARCH 900  // what tests on a CPU run as; a launch asks the device instead
#endif

namespace swiftspec::ptx {

// Copies of many bytes by one thread, and launches that start early. Without them a warp copies 16 bytes at a time.
constexpr bool kBulk = SWIFTSPEC_ARCH >= 900;
constexpr int kLoaders = kBulk ? 1 : 32;  // lanes of a warp that make a bulk copy together

// Blocks that reach each other's shared memory; Device::clusters says it to the host.
constexpr bool kClusters = SWIFTSPEC_ARCH >= 900 && SWIFTSPEC_ARCH < 1200;

}  // namespace swiftspec::ptx
