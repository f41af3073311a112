// The binding functions of the module, each defined in the file of its name.
#pragma once

// Forward declaration, since pybind11's headers compile slowly.
namespace pybind11 __attribute__((visibility("hidden"))) {
class module_;
}

namespace swiftspec::binding {

namespace py = pybind11;

void bind_linear(py::module_& m);
void bind_pack(py::module_& m);
void bind_attention(py::module_& m);
void bind_cache(py::module_& m);
void bind_delta(py::module_& m);
void bind_sampling(py::module_& m);
void bind_shm(py::module_& m);
void bind_mailbox(py::module_& m);
void bind_decoder(py::module_& m);
void bind_tree(py::module_& m);
void bind_suffix(py::module_& m);
void bind_rounds(py::module_& m);
void bind_particles(py::module_& m);
void bind_population(py::module_& m);

// In builds with CUDA.
void bind_cuda(py::module_& m);  // calls the following ones
void bind_cuda_linear(py::module_& m);
void bind_cuda_attention(py::module_& m);
void bind_cuda_cache(py::module_& m);
void bind_cuda_sampling(py::module_& m);
void bind_cuda_particles(py::module_& m);
void bind_cuda_tree(py::module_& m);
void bind_cuda_peers(py::module_& m);
void bind_cuda_stamps(py::module_& m);  // with SWIFTSPEC_STAMPS

}  // namespace swiftspec::binding
