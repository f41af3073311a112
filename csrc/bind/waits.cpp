// What is thrown when a wait ends without what was waited for, as Python's errors.
#include "bind/waits.h"

#include <exception>
#include <system_error>

#include "bind/module.h"
#include "host/shm/segment.h"

namespace swiftspec::binding {

namespace {

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

void bind_waits(py::module_&) { py::register_exception_translator(&raise); }

}  // namespace swiftspec::binding
