// Bindings of a KV cache on a GPU and moves of its slots.
#include "bind/cuda_cache.h"

#include <pybind11/stl.h>

#include <vector>

#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

CudaCache make_cuda_cache(const Array& k, const Array& v) {
  const CudaCache cache(gpu(), k, v);
  check(cache.layers >= 1 && cache.layers < 65536 && cache.kv_heads >= 1, "between 1 and 65535 layers");
  check(cache.slot_bytes() >= 16 && cache.slot_bytes() % 16 == 0, "slots must be multiples of 16 bytes");
  aligned("k", cache.keys);
  aligned("v", cache.values);
  return cache;
}

void move(const CudaCache& cache, int64_t sequence, const std::vector<int64_t>& source, int64_t start,
          uintptr_t stream) {
  const int64_t skipped = cache.offset(0, sequence);
  check_moves(source, start, cache.capacity);
  const MoveArgs args{cache.keys + skipped,
                      cache.layer_bytes(),
                      cache.layers,
                      cache.kv_heads,
                      cache.capacity,
                      cache.slot_bytes(),
                      source.data(),
                      static_cast<int64_t>(source.size()),
                      start};
  cuda::move_kv(args, cache.values + skipped, stream_arg(stream));
}

}  // namespace

void bind_cuda_cache(py::module_& m) {
  py::class_<CudaCache>(
      m, "CudaCache",
      "A cache [layers, sequences, kv_heads, capacity, head_dim] on a GPU, which it keeps alive; float8 "
      "comes as uint8.")
      .def(py::init(&make_cuda_cache), py::arg("k"), py::arg("v"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("move", &move, py::arg("sequence"), py::arg("source"), py::arg("start"), py::arg("stream"),
           "Moves slots source[i] to start + i, in place and in every layer. Nothing is copied to the GPU: the slots "
           "are arguments of the launch.");
}

}  // namespace swiftspec::binding
