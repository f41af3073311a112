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

void all_reduce(host::Group& group, uintptr_t x, int64_t count, const std::string& element, double seconds) {
  size_arg("count", count, 0);
  const bool wide = element == "float64";
  check(wide || element == "float32" || element == "bfloat16", "element must be float32, float64 or bfloat16");
  auto* values = pointer_arg<uint8_t>("x", x, count);
  const auto kind = wide                   ? host::Element::kFloat64
                    : element == "float32" ? host::Element::kFloat32
                                           : host::Element::kBfloat16;
  py::gil_scoped_release unlocked;
  group.all_reduce(values, count, kind, seconds);
}

void all_gather(host::Group& group, uintptr_t x, int64_t bytes, uintptr_t out, double seconds) {
  size_arg("bytes", bytes, 0);
  const auto* mine = pointer_arg<const uint8_t>("x", x, bytes);
  auto* all = pointer_arg<uint8_t>("out", out, bytes);
  py::gil_scoped_release unlocked;
  group.all_gather(mine, bytes, all, seconds);
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
      .def("all_reduce", &all_reduce, py::arg("x"), py::arg("count"), py::arg("element"), py::arg("seconds"))
      .def("all_gather", &all_gather, py::arg("x"), py::arg("bytes"), py::arg("out"), py::arg("seconds"))
      .def("leave", &host::Group::leave);
}

}  // namespace swiftspec::binding
