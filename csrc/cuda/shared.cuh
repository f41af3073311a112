// A block's shared memory.
#pragma once

#ifndef __CUDACC__
#include <simt/shared.h>  // tests/simt, a GPU emulated on a CPU
#else

#include <cstdint>

namespace swiftspec::cuda {

// What the launch has asked for (Launch::shared).
__device__ inline uint8_t* dynamic_shared() {
  extern __shared__ __align__(128) uint8_t memory[];
  return memory;
}

// The block's one variable of this type.
template <class T>
__device__ T& shared_variable() {
  __shared__ T variable;
  return variable;
}

}  // namespace swiftspec::cuda

#endif
