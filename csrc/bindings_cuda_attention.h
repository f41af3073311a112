// The part of _C that a build with CUDA has for attention, sampling, moves and the tree.
#pragma once

#include <pybind11/pybind11.h>

void bind_cuda_attention(pybind11::module_& m);
