// The launches of csrc/cuda as swiftspec/_C has them, on the emulated GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/cuda_arguments.h"
#include "bind/module.h"
#include "simt/machine.h"

namespace swiftspec::binding {

Device gpu() { return kCpu; }

}  // namespace swiftspec::binding

namespace {

// Runs Python's signal handlers, such as the one by which pytest ends a test that takes too long.
void see_signals() {
  if (PyGILState_Check() == 1 && PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace

PYBIND11_MODULE(emulated, m) {
  swiftspec::binding::bind_cuda(m);
  simt::Machine::get().pause = see_signals;
  m.def("seed", [](uint64_t seed) { simt::Machine::get().seed(seed); }, "Seeds the schedule of everything that follows.");
  m.def("gpu", [](const std::vector<unsigned>& parts, size_t shared, int driver) {
    simt::Machine::get().parts = parts;
    simt::Machine::get().shared = shared;
    simt::Machine::get().driver = driver;
    ++simt::Machine::get().ordinal;
  }, pybind11::arg("parts"), pybind11::arg("shared") = 0, pybind11::arg("driver") = 12040,
        "Replaces the GPU by one with these numbers of concurrent blocks in its parts, these bytes of shared memory (0: "
        "the default), and a driver of this CUDA version.");
  m.def("queues", [](bool on) { simt::Machine::get().queues = on; }, "Whether launches wait until others follow.");
  m.def("finish", [] { simt::Machine::get().finish(); }, "Blocks until all launches have ended.");
  m.def("spin", [] {
    simt::Launch launch{.grid = {1, 1, 1}, .threads = {32, 1, 1}, .body = {}};
    launch.body = [] {
      for (;;) simt::Machine::get().yield();
    };
    simt::Machine::get().run(std::move(launch));
    simt::Machine::get().finish();
  }, "A kernel that never ends.");
  m.def("broken", [] { return simt::Machine::get().broken; }, "Whether a kernel has ended itself.");
}
