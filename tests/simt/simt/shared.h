// csrc/cuda/shared.cuh on the emulated GPU.
#pragma once

#include <typeindex>

#include "machine.h"

namespace swiftspec::cuda {

inline uint8_t* dynamic_shared() { return simt::Machine::get().self().block->dynamic.get(); }

inline uint8_t* swizzle_aligned_shared() { return dynamic_shared(); }

template <class T>
T& shared_variable() {
  return *reinterpret_cast<T*>(simt::Machine::get().self().block->variable(typeid(T), sizeof(T)));
}

}  // namespace swiftspec::cuda
