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
#define SWIFTSPEC_PRAGMA(text) _Pragma(#text)
#define SWIFTSPEC_UNROLL_BY(count) SWIFTSPEC_PRAGMA(unroll count)
#else
#define SWIFTSPEC_UNROLL_BY(count)
#define SWIFTSPEC_UNROLL
#define SWIFTSPEC_NO_UNROLL
#endif
