// Bindings of everything that needs a GPU.
#include "bind/module.h"

namespace swiftspec::binding {

void bind_cuda(py::module_& m) {
  bind_cuda_peers(m);  // first, so that its classes are known to the functions that take them
  bind_cuda_cache(m);
  bind_cuda_linear(m);
  bind_cuda_attention(m);
  bind_cuda_sampling(m);
  bind_cuda_particles(m);
  bind_cuda_tree(m);
#ifdef SWIFTSPEC_STAMPS
  bind_cuda_stamps(m);
#endif
}

}  // namespace swiftspec::binding
