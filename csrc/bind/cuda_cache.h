// A KV cache on a GPU: a type of its own, CudaCache in Python.
#pragma once

#include "bind/cache.h"

namespace swiftspec::binding {

struct CudaCache : Cache {
  using Cache::Cache;
};

}  // namespace swiftspec::binding
