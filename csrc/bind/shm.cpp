// Collectives over shared memory, and the errors of all that waits for another process.
#include <exception>
#include <memory>
#include <string>
#include <system_error>

#include "bind/arguments.h"
#include "bind/module.h"
#include "bind/waits.h"
#include "host/shm/ll_shm.h"
#include "host/shm/segment.h"

namespace swiftspec::binding {

namespace {

void all_reduce(host::Group& group, const Array& x, double seconds) {
  const bool single = x.type() == kFloat32, wide = x.type() == kFloat64;
  const Type type = single ? kFloat32 : wide ? kFloat64 : kBfloat16;
  check(x.rank() < 0 || x.type() == type, "a sum is of float32, float64 or bfloat16");
  void* values = x.flat(type, kCpu, "x");
  const auto kind = single ? host::Element::kFloat32 : wide ? host::Element::kFloat64 : host::Element::kBfloat16;
  py::gil_scoped_release unlocked;
  group.all_reduce(values, x.count(), kind, seconds);
}

void all_gather(host::Group& group, const Array& x, const Array& out, double seconds) {
  const void* mine = x.flat(x.type(), kCpu, "x");
  void* all = out.flat(x.type(), kCpu, "out");
  check(out.count() == group.size() * x.count(), "out must hold every rank's x");
  py::gil_scoped_release unlocked;
  group.all_gather(mine, x.bytes(), all, seconds);
}

std::unique_ptr<host::Group> make_group(const std::string& name, int rank, int size, int64_t capacity, double seconds,
                                        bool spin) {
  check(size >= 1 && size <= ll::kMaxRanks && rank >= 0 && rank < size, "1 to 16 ranks, 0 <= rank < size");
  size_arg("capacity", capacity, 8);
  py::gil_scoped_release unlocked;
  return std::make_unique<host::Group>(name, rank, size, capacity, seconds, host::Patience{spin, &interrupted});
}

// What is thrown when a wait ends without what was waited for, as Python's errors.
void raise(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const host::TimedOut& e) {
    PyErr_SetString(PyExc_TimeoutError, e.what());
  } catch (const host::PeerLost& e) {
    PyErr_SetString(PyExc_ConnectionError, e.what());
  } catch (const std::system_error& e) {
    PyErr_SetString(PyExc_OSError, e.what());
  } catch (const host::Interrupted&) {  // the exception is set already
  }
}

}  // namespace

void bind_shm(py::module_& m) {
  py::register_exception_translator(&raise);
  py::class_<host::Group>(m, "Group",
                          "Collectives over shared memory; see Group in host/shm/ll_shm.h. Times in seconds.")
      .def(py::init(&make_group), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("capacity"),
           py::arg("seconds"), py::arg("spin"))
      .def("all_reduce", &all_reduce, py::arg("x"), py::arg("seconds"),
           "Sums x, float32, float64 or bfloat16, in place and in the order of the ranks.")
      .def("all_gather", &all_gather, py::arg("x"), py::arg("out"), py::arg("seconds"),
           "Every rank's x, in the order of the ranks.")
      .def("leave", &host::Group::leave, "What was sent stays readable.");
}

}  // namespace swiftspec::binding
