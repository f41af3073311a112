// swiftspec._C, the operators for Python. Nothing but this folder knows it. Arrays arrive as they are (bind/array.h)
// and are checked here.
#include "bind/module.h"

#include "bind/arguments.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

void set_threads(int64_t count) {
  size_arg("count", count, 1);
  check(count <= 1024, "more threads than any machine has");
  py::gil_scoped_release unlocked;
  host::set_threads(static_cast<int>(count));
}

// How the CPU's operators run: instructions and threads.
void bind_cpu(py::module_& m) {
  m.def("level", &host::level, "The instructions in use: avx512_bf16, avx512, avx2 or none.");
  m.def("use_level", &host::use_level, py::arg("name"), "Use others, for a test; False where they are missing.");
  m.def("set_threads", &set_threads, py::arg("count"),
        "How many threads share large products, the caller's among them.");
  m.def("threads", &host::threads, "What set_threads was told; 1 at first, and after a fork.");
  m.def("peak", &host::peak, py::arg("rounds"), py::arg("wide"),
        "Run a loop of products alone; how many floating-point operations it was.");
}

}  // namespace

}  // namespace swiftspec::binding

PYBIND11_MODULE(_C, m) {
  using namespace swiftspec::binding;
  m.doc() = "SwiftSpec's native operators. Arrays are checked: ValueError names the one that is wrong.";
  m.attr("build_info") = SWIFTSPEC_BUILD_INFO;
#ifdef SWIFTSPEC_WITH_CUDA
  m.attr("cuda_built") = true;
  m.attr("cuda_archs") = py::make_tuple(SWIFTSPEC_CUDA_ARCHS);
#else
  m.attr("cuda_built") = false;
  m.attr("cuda_archs") = py::tuple();
#endif
  bind_cpu(m);
  bind_linear(m);
  bind_pack(m);
  bind_cache(m);
  bind_attention(m);
  bind_sampling(m);
  bind_shm(m);
  bind_tree(m);
  bind_mailbox(m);
  bind_decoder(m);
  bind_rounds(m);
  bind_particles(m);
  bind_population(m);
#ifdef SWIFTSPEC_WITH_CUDA
  bind_cuda(m);
#endif
}
