// KV cache on the CPU.
#include "bind/cache.h"

#include <pybind11/stl.h>

#include <vector>

#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

void move(const Cache& cache, int64_t sequence, const std::vector<int64_t>& source, int64_t start) {
  const auto count = static_cast<int64_t>(source.size());
  check_moves(cache, source, start);
  const int64_t skipped = cache.offset(0, sequence);
  MoveArgs args{cache.keys + skipped, cache.layer_bytes(), cache.layers, cache.kv_heads, cache.capacity,
                cache.slot_bytes(),   source.data(),       count,        start};
  py::gil_scoped_release unlocked;
  host::move_kv(args);
  args.region = cache.values + skipped;
  host::move_kv(args);
}

}  // namespace

void bind_cache(py::module_& m) {
  py::class_<Cache>(m, "Cache",
                    "A KV cache: keys and values [layers, sequences, kv_heads, capacity, head_dim], which it keeps "
                    "alive.")
      .def(py::init([](const Array& k, const Array& v) { return Cache(kCpu, k, v); }), py::arg("k"), py::arg("v"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("move", &move, py::arg("sequence"), py::arg("source"), py::arg("start"),
           "Moves slots source[i] to start + i, in place and in every layer; see MoveArgs in common/arguments.h.");
}

}  // namespace swiftspec::binding
