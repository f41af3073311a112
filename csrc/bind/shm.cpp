// Collectives over shared memory, and the translation of their exceptions.
#include <exception>
#include <memory>
#include <string>
#include <system_error>

#include "bind/arguments.h"
#include "bind/module.h"
#include "host/shm/ll_shm.h"
#include "host/shm/segment.h"

namespace swiftspec::binding {

namespace {

void all_reduce(host::ShmGroup& group, const Array& x, double timeout_s) {
  const bool is_f32 = x.type() == kFloat32, is_f64 = x.type() == kFloat64;
  const Type type = is_f32 ? kFloat32 : is_f64 ? kFloat64 : kBfloat16;
  check(x.rank() < 0 || x.type() == type, "all_reduce takes float32, float64 or bfloat16");
  void* values = x.flat(type, kCpu, "x");
  const auto kind = is_f32 ? host::Element::kFloat32 : is_f64 ? host::Element::kFloat64 : host::Element::kBfloat16;
  py::gil_scoped_release unlocked;
  group.all_reduce(values, x.count(), kind, timeout_s);
}

void all_gather(host::ShmGroup& group, const Array& x, const Array& out, double timeout_s) {
  const void* mine = x.flat(x.type(), kCpu, "x");
  void* all = out.flat(x.type(), kCpu, "out");
  check(out.count() == group.size() * x.count(), "out must hold every rank's x");
  py::gil_scoped_release unlocked;
  group.all_gather(mine, x.bytes(), all, timeout_s);
}

std::unique_ptr<host::ShmGroup> make_group(const std::string& name, int rank, int size, int64_t capacity,
                                           double timeout_s, bool spin) {
  check(size >= 1 && size <= ll::kMaxRanks && rank >= 0 && rank < size, "1 to 16 ranks, 0 <= rank < size");
  size_arg("capacity", capacity, 8);
  py::gil_scoped_release unlocked;
  return std::make_unique<host::ShmGroup>(name, rank, size, capacity, timeout_s, host::WaitPolicy{spin, &interrupted});
}

// Translates the exceptions of waits to Python's.
void raise(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const host::TimedOut& e) {
    PyErr_SetString(PyExc_TimeoutError, e.what());
  } catch (const host::PeerLost& e) {
    PyErr_SetString(PyExc_ConnectionError, e.what());
  } catch (const std::system_error& e) {
    PyErr_SetString(PyExc_OSError, e.what());
  } catch (const host::Interrupted&) {  // the Python exception is already set
  }
}

}  // namespace

void bind_shm(py::module_& m) {
  py::register_exception_translator(&raise);
  py::class_<host::ShmGroup>(m, "ShmGroup", "Collectives over shared memory; see ShmGroup in host/shm/ll_shm.h.")
      .def(py::init(&make_group), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("capacity"),
           py::arg("timeout_s"), py::arg("spin"))
      .def("all_reduce", &all_reduce, py::arg("x"), py::arg("timeout_s"),
           "Sums x (float32, float64 or bfloat16) over the ranks, in place and in rank order.")
      .def("all_gather", &all_gather, py::arg("x"), py::arg("out"), py::arg("timeout_s"),
           "Gathers x of every rank, in rank order.")
      .def("leave", &host::ShmGroup::leave, "Announces that this rank sends no more. Sent data stays readable.");
}

}  // namespace swiftspec::binding
