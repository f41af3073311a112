// swiftspec._C, the operators for Python. Nothing but this folder knows it. Tensors arrive as addresses and sizes; what
// can be checked of them is checked here.
#include "bind/module.h"

PYBIND11_MODULE(_C, m) {
  using namespace swiftspec::binding;
  m.doc() = "SwiftSpec's native kernels: addresses and sizes in, nothing out.";
  m.attr("build_info") = SWIFTSPEC_BUILD_INFO;
#ifdef SWIFTSPEC_WITH_CUDA
  m.attr("cuda_built") = true;
#else
  m.attr("cuda_built") = false;
#endif
  bind_cpu(m);
  bind_noise(m);
  bind_linear(m);
  bind_attention(m);
  bind_cache(m);
  bind_sampling(m);
  bind_waits(m);
  bind_group(m);
  bind_mailbox(m);
  bind_decoder(m);
  bind_tree(m);
  bind_rounds(m);
#ifdef SWIFTSPEC_WITH_CUDA
  bind_cuda(m);
#endif
}
