// What the module is made of: each thing that Python sees is bound in the file of its name.
#pragma once

#include <pybind11/pybind11.h>

namespace swiftspec::binding {

namespace py = pybind11;

void bind_cpu(py::module_& m);
void bind_noise(py::module_& m);
void bind_linear(py::module_& m);
void bind_attention(py::module_& m);
void bind_cache(py::module_& m);
void bind_sampling(py::module_& m);
void bind_waits(py::module_& m);
void bind_group(py::module_& m);
void bind_mailbox(py::module_& m);
void bind_decoder(py::module_& m);
void bind_tree(py::module_& m);
void bind_rounds(py::module_& m);

// Where CUDA is built.
void bind_cuda(py::module_& m);  // all that follow
void bind_cuda_linear(py::module_& m);
void bind_cuda_embed(py::module_& m);
void bind_cuda_norm(py::module_& m);
void bind_cuda_attention(py::module_& m);
void bind_cuda_cache(py::module_& m);
void bind_cuda_noise(py::module_& m);
void bind_cuda_sampling(py::module_& m);
void bind_cuda_chains(py::module_& m);
void bind_cuda_tree(py::module_& m);
void bind_cuda_channel(py::module_& m);
void bind_cuda_peers(py::module_& m);

}  // namespace swiftspec::binding
