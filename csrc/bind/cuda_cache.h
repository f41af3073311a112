// A KV cache on a GPU. It is a separate type (CudaCache in Python), so that CPU operators do not accept it.
#pragma once

#include "bind/cache.h"

namespace swiftspec::binding {

struct CudaCache : Cache {
  using Cache::Cache;
};

}  // namespace swiftspec::binding
