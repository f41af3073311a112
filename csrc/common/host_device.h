// Macros that let one source be compiled for the CPU and, by nvcc, for the GPU.
#pragma once

#if defined(__CUDACC__)
#define SWIFTSPEC_HD __host__ __device__ inline
#else
#define SWIFTSPEC_HD inline
#endif

#if defined(__CUDA_ARCH__)
#define SWIFTSPEC_UNROLL _Pragma("unroll")
#define SWIFTSPEC_NO_UNROLL _Pragma("unroll 1")
#else
#define SWIFTSPEC_UNROLL
#define SWIFTSPEC_NO_UNROLL
#endif
