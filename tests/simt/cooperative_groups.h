// A cluster of blocks on the emulated GPU.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

class cluster_group {
 public:
  void sync() const {
    simt::Cluster& cluster = *block().cluster;
    simt::Machine::get().meet(cluster.gate, cluster.live, "cluster.sync");
  }
  unsigned block_rank() const { return block().rank; }
  unsigned thread_rank() const { return block().rank * blockDim.x + threadIdx.x; }
  template <class T>
  T* map_shared_rank(T* p, int rank) const {
    simt::Block& mine = block();
    return static_cast<T*>(mine.in(*mine.cluster->blocks.at(static_cast<size_t>(rank)), p, sizeof(T)));
  }

 private:
  static simt::Block& block() { return *simt::Machine::get().self().block; }
};

inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
