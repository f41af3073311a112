// Access to the shared memory of a block.
#pragma once

#ifndef __CUDACC__
#include <simt/shared.h>  // tests/simt, a GPU emulated on a CPU
#else

#include <cstdint>

namespace swiftspec::cuda {

// The dynamic shared memory of the launch (Launch::shared bytes).
__device__ inline uint8_t* dynamic_shared() {
  extern __shared__ __align__(128) uint8_t memory[];
  return memory;
}

// The same memory for a kernel without static shared variables, aligned as swizzled operands of wgmma have to be.
__device__ inline uint8_t* swizzle_aligned_shared() {
  extern __shared__ __align__(1024) uint8_t aligned_memory[];
  return aligned_memory;
}

// A static shared variable, one per type and block.
template <class T>
__device__ T& shared_variable() {
  __shared__ T variable;
  return variable;
}

}  // namespace swiftspec::cuda

#endif
