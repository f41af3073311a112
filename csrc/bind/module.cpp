// The Python module swiftspec._C. Only csrc/bind depends on Python; it checks all arguments (bind/array.h).
#include "bind/module.h"

#include <pybind11/stl.h>

#include "bind/arguments.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

void set_threads(int64_t count) {
  size_arg("count", count, 1);
  check(count <= 1024, "at most 1024 threads");
  py::gil_scoped_release unlocked;
  host::set_threads(static_cast<int>(count));
}

// ISA level and threads of the CPU operators.
void bind_cpu(py::module_& m) {
  m.def("level", &host::level,
        "The ISA level in use: amx, avx512_bf16, avx512_vnni, avx512, avx_vnni or avx2; neon_dotprod or neon; or "
        "none.");
  m.def("use_level", &host::use_level, py::arg("name"),
        "Selects an ISA level, for tests. Returns False if this CPU does not support it.");
  m.def("levels", &host::supported_level_names,
        "The ISA levels that this CPU supports, the preferred one first; empty if there is none.");
  m.def("set_threads", &set_threads, py::arg("count"),
        "Sets the number of threads that share large products, including the caller.");
  m.def("threads", &host::threads, "The number of threads; 1 by default and after a fork.");
  m.def("peak", &host::peak, py::arg("rounds"), py::arg("float32"),
        "Runs `rounds` iterations of a loop of products only. Returns its number of floating-point operations.");
}

}  // namespace

}  // namespace swiftspec::binding

PYBIND11_MODULE(_C, m) {
  using namespace swiftspec::binding;
  m.doc() = "SwiftSpec's native operators. Invalid arrays raise ValueError with the name of the argument.";
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
  bind_delta(m);  // before its uses
  bind_cache(m);
  bind_attention(m);
  bind_sampling(m);
  bind_shm(m);
  bind_tree(m);
  bind_suffix(m);
  bind_mailbox(m);
  bind_decoder(m);
  bind_rounds(m);
  bind_particles(m);
  bind_population(m);
#ifdef SWIFTSPEC_WITH_CUDA
  bind_cuda(m);
#endif
}
