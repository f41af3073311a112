// A cache on a GPU: of a type of its own, which Python sees as CudaCache.
#pragma once

#include "bind/cache.h"

namespace swiftspec::binding {

struct CudaCache : Cache {
  using Cache::Cache;
};

}  // namespace swiftspec::binding
