// The parts of CUDA that csrc/cuda uses, on the emulated GPU of simt/machine.h. All streams are one.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <unordered_map>

#include "simt/machine.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// ---- Threads.

namespace simt {

struct Axis {
  unsigned (*read)();
  operator unsigned() const { return read(); }
};
struct Axes {
  Axis x, y, z;
};

inline const Launch& launch() { return Machine::get().self().block->grid->launch; }

}  // namespace simt

inline constexpr simt::Axes threadIdx{[] { return simt::Machine::get().self().index.x; },
                                      [] { return simt::Machine::get().self().index.y; },
                                      [] { return simt::Machine::get().self().index.z; }};
inline constexpr simt::Axes blockIdx{[] { return simt::Machine::get().self().block->index.x; },
                                     [] { return simt::Machine::get().self().block->index.y; },
                                     [] { return simt::Machine::get().self().block->index.z; }};
inline constexpr simt::Axes blockDim{[] { return simt::launch().threads.x; }, [] { return simt::launch().threads.y; },
                                     [] { return simt::launch().threads.z; }};
inline constexpr simt::Axes gridDim{[] { return simt::launch().grid.x; }, [] { return simt::launch().grid.y; },
                                    [] { return simt::launch().grid.z; }};

inline void __syncthreads() {
  simt::Block& block = *simt::Machine::get().self().block;
  simt::Machine::get().meet(block.gate, block.live, "__syncthreads");
}

inline void __syncwarp(uint32_t mask = 0xffffffffu) {
  simt::Machine::get().collective(mask, "__syncwarp", nullptr, nullptr, [](simt::Warp&) {});
}

inline uint32_t __ballot_sync(uint32_t mask, bool x) {
  uint32_t word = 0;
  simt::Machine::get().collective(mask, "__ballot_sync", &x, &word, [](simt::Warp& warp) {
    uint32_t all = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if (warp.mask >> lane & 1) all |= static_cast<uint32_t>(*static_cast<const bool*>(warp.in[lane])) << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (warp.mask >> lane & 1) *static_cast<uint32_t*>(warp.out[lane]) = all;
    }
  });
  return word;
}

namespace simt {

template <class T>
struct Shuffle {
  T value;
  int source;
};

// Each lane receives the value of the lane that it names.
template <class T>
T shuffle(uint32_t mask, const char* what, T x, int source) {
  const Shuffle<T> mine{x, source};
  T got{};
  Machine::get().collective(mask, what, &mine, &got, [](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      if ((warp.mask >> lane & 1) == 0) continue;
      const int from = static_cast<const Shuffle<T>*>(warp.in[lane])->source;
      if (from < 0 || from > 31 || (warp.mask >> from & 1) == 0) Machine::get().fault("a shuffle from a lane outside of its mask");
      *static_cast<T*>(warp.out[lane]) = static_cast<const Shuffle<T>*>(warp.in[from])->value;
    }
  });
  return got;
}

inline int lane() { return Machine::get().self().lane; }

}  // namespace simt

template <class T>
T __shfl_sync(uint32_t mask, T x, int source) {
  return simt::shuffle(mask, "__shfl_sync", x, source & 31);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T x, int other) {
  return simt::shuffle(mask, "__shfl_xor_sync", x, simt::lane() ^ other);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T x, int by) {
  return simt::shuffle(mask, "__shfl_up_sync", x, simt::lane() < by ? simt::lane() : simt::lane() - by);
}

inline void __nanosleep(unsigned nanoseconds) {
  for (unsigned i = 0; i <= nanoseconds / 256; ++i) simt::Machine::get().yield();
}
[[noreturn]] inline void __trap() { simt::Machine::get().trap(); }
inline void __threadfence() {}
inline void __threadfence_system() {}

// Atomic: other threads may run before it, but not between the read and the write.
template <class T>
T atomicAdd(T* to, T x) {
  simt::Machine::get().yield();
  const T before = *to;
  *to = before + x;
  return before;
}
inline uint32_t atomicAdd(uint32_t* to, int x) { return atomicAdd(to, static_cast<uint32_t>(x)); }
inline int atomicMin(int* to, int x) {
  const int before = *to;
  *to = std::min(before, x);
  return before;
}
inline int atomicMax(int* to, int x) {
  const int before = *to;
  *to = std::max(before, x);
  return before;
}

// ---- Arithmetic.

inline int min(int a, int b) { return a < b ? a : b; }
template <class T>
T __ldcg(const T* p) {
  return *p;
}
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selector >> 4 * i & 7;
    out |= ((from < 4 ? x : y) >> 8 * (from % 4) & 0xffu) << 8 * i;
  }
  return out;
}
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }

// ---- The runtime.

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9, cudaErrorLaunchFailure = 719 };
using cudaError = cudaError_t;
struct CUstream_st;
using cudaStream_t = CUstream_st*;

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    default: return "unspecified launch failure";
  }
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization,
};
union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int cooperative, programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
constexpr int cudaSharedmemCarveoutMaxShared = 100;
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrL2CacheSize,
  cudaDevAttrMultiProcessorCount,
};

namespace simt {

// The GPU that the kernels are compiled for: an H100, or with less memory and without clusters an RTX 3090.
constexpr bool kHopper = __CUDA_ARCH__ >= 900;
constexpr size_t kSharedUsual = kHopper ? 232448 : 101376, kSharedUnasked = 49152;
inline size_t shared_most() { return Machine::get().shared != 0 ? Machine::get().shared : kSharedUsual; }

inline std::unordered_map<const void*, size_t>& shared_allowed() {
  static std::unordered_map<const void*, size_t> bytes;
  return bytes;
}

// Returns false if CUDA would refuse the configuration.
inline bool read(const cudaLaunchConfig_t& config, const void* kernel, Launch& launch) {
  launch.grid = {config.gridDim.x, config.gridDim.y, config.gridDim.z};
  launch.threads = {config.blockDim.x, config.blockDim.y, config.blockDim.z};
  launch.shared = config.dynamicSmemBytes;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& one = config.attrs[i];
    if (one.id == cudaLaunchAttributeClusterDimension) launch.cluster = one.val.clusterDim.x;
    if (one.id == cudaLaunchAttributeCooperative) launch.together = one.val.cooperative != 0;
    if (one.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      launch.early = one.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  const auto allowed = shared_allowed().find(kernel);
  const size_t most = allowed == shared_allowed().end() ? kSharedUnasked : allowed->second;
  const Index &grid = launch.grid, &threads = launch.threads;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) return false;
  if (!kHopper && (launch.cluster > 1 || launch.early)) return false;
  if (launch.early && Machine::get().driver < 12040) return false;
  if (launch.cluster < 1 || launch.cluster > 8 || grid.x % launch.cluster != 0) return false;
  const unsigned fit = Machine::get().clusters(launch.cluster);
  if (launch.together && grid.x * grid.y * grid.z > fit * launch.cluster) return false;
  return threads.x >= 1 && threads.x <= 1024 && threads.y == 1 && threads.z == 1 && launch.shared <= most;
}

}  // namespace simt

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  if (simt::Machine::get().broken) return cudaErrorLaunchFailure;
  simt::Launch launch;
  if (!simt::read(*config, reinterpret_cast<const void*>(kernel), launch)) return cudaErrorInvalidConfiguration;
  launch.body = [kernel, held = std::tuple<std::decay_t<Parameters>...>(arguments...)] { std::apply(kernel, held); };
  simt::Machine::get().run(std::move(launch));
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel kernel, const cudaLaunchConfig_t* config) {
  simt::Launch launch;
  if (!simt::read(*config, reinterpret_cast<const void*>(kernel), launch)) return cudaErrorInvalidConfiguration;
  *count = static_cast<int>(simt::Machine::get().clusters(launch.cluster));
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute what, int bytes) {
  if (what != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (bytes < 0 || static_cast<size_t>(bytes) > simt::shared_most()) return cudaErrorInvalidValue;
  simt::shared_allowed()[reinterpret_cast<const void*>(kernel)] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

inline cudaError_t cudaDriverGetVersion(int* version) { return *version = simt::Machine::get().driver, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = simt::Machine::get().ordinal, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }  // there is one
inline cudaError_t cudaGetLastError() { return simt::Machine::get().broken ? cudaErrorLaunchFailure : cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return simt::Machine::get().finish(), cudaGetLastError(); }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  constexpr int kArch = __CUDA_ARCH__ / 10;
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = kArch / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = kArch % 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(simt::shared_most()); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(simt::shared_most()) + 1024; break;
    case cudaDevAttrL2CacheSize: *value = simt::kHopper ? 50 << 20 : 6 << 20; break;
    case cudaDevAttrMultiProcessorCount: *value = static_cast<int>(simt::Machine::get().clusters(1)); break;
  }
  return cudaSuccess;
}

#include "simt/memory.h"
