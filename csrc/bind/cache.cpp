// KV cache on the CPU.
#include "bind/cache.h"

#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

Cache make_kv_cache(const Array& k, const Array& v) { return {kCpu, k, v}; }

ModelCache make_model_cache(const std::vector<const Cache*>& kv, std::optional<const host::DeltaCache*> delta) {
  check(!kv.empty(), "a model needs a KV cache");
  const Cache& first = *kv[0];
  ModelCache caches{{{}, delta.value_or(nullptr)}, first.type};
  for (const Cache* cache : kv) {
    check(cache->type == first.type && cache->sequences == first.sequences && cache->capacity == first.capacity,
          "the KV caches differ in type, sequences or capacity");
    caches.kv.push_back(*cache);
  }
  check(caches.delta == nullptr || caches.delta->sequences == first.sequences, "the caches have other sequences");
  return caches;
}

void move(const Cache& cache, int64_t sequence, const std::vector<int64_t>& source, int64_t start) {
  check_moves(source, start, cache.capacity);
  cache.offset(0, sequence);  // checks the sequence
  py::gil_scoped_release unlocked;
  cache.move(sequence, source, start);
}

// `buffer`: [layers, sequences, slots, ...] of any type.
void move_slots(const Array& buffer, int64_t sequence, const std::vector<int64_t>& source, int64_t start) {
  const int64_t layers = buffer.size(0), sequences = buffer.size(1), slots = buffer.size(2);
  auto* data = static_cast<uint8_t*>(buffer.flat(buffer.type(), kCpu, "buffer"));
  check(layers > 0 && sequence >= 0 && sequence < sequences && slots > 0, "a region that the buffer lacks");
  check_moves(source, start, slots);
  const int64_t region = buffer.bytes() / (layers * sequences);
  py::gil_scoped_release unlocked;
  host::move_kv({data + sequence * region, sequences * region, layers, 1, slots, region / slots, source.data(),
                 static_cast<int64_t>(source.size()), start});
}

}  // namespace

void bind_cache(py::module_& m) {
  py::class_<Cache>(m, "Cache",
                    "A KV cache: keys and values [layers, sequences, kv_heads, capacity, head_dim], which it keeps "
                    "alive.")
      .def(py::init(&make_kv_cache), py::arg("k"), py::arg("v"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("move", &move, py::arg("sequence"), py::arg("source"), py::arg("start"),
           "Moves slots source[i] to start + i, in place and in every layer; see MoveArgs in common/arguments.h.");
  py::class_<ModelCache>(m, "ModelCache",
                         "The caches of a model: a KV cache for each shape of its attention layers, and its delta cache "
                         "or None. Keeps them alive.")
      .def(py::init(&make_model_cache), py::arg("kv"), py::arg("delta"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>());
  m.def("move_slots", &move_slots, py::arg("buffer"), py::arg("sequence"), py::arg("source"), py::arg("start"),
        "The same for one buffer [layers, sequences, slots, ...] of any type.");
}

}  // namespace swiftspec::binding
