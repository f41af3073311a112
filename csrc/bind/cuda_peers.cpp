// What ranks on the GPUs of one machine need of each other before their kernels can sum.
#include <memory>
#include <string>

#include "bind/arguments.h"
#include "bind/module.h"
#include "bind/waits.h"
#include "cuda/peers/peers.h"
#include "host/shm/segment.h"

namespace swiftspec::binding {

namespace {

// A word of shared memory that every rank's host and GPU see.
class Word {
 public:
  Word(const std::string& name, int rank, int size, double seconds)
      : segment_(name, rank, size, sizeof(uint64_t), seconds, {false, &interrupted}),
        pinned_(segment_.data(), sizeof(uint64_t)) {}
  py::memoryview view() { return py::memoryview::from_memory(segment_.data(), sizeof(uint64_t)); }

 private:
  host::Segment segment_;
  cuda::Pinned pinned_;
};

std::unique_ptr<Word> make_word(const std::string& name, int rank, int size, double seconds) {
  check(size >= 1 && size <= ll::kMaxRanks && rank >= 0 && rank < size, "1 to 16 ranks, 0 <= rank < size");
  py::gil_scoped_release unlocked;
  return std::make_unique<Word>(name, rank, size, seconds);
}

std::unique_ptr<cuda::Inbox> make_inbox(int64_t bytes) {
  check(bytes >= 1, "an inbox has at least a byte");
  return std::make_unique<cuda::Inbox>(bytes);
}

py::bytes handle_of(const cuda::Inbox& inbox) {
  const cuda::PeerHandle handle = inbox.handle();
  return {handle.data(), handle.size()};
}

std::unique_ptr<cuda::PeerInbox> open_inbox(const std::string& handle) {
  cuda::PeerHandle wanted;
  check(handle.size() == wanted.size(), "a handle has 64 bytes");
  handle.copy(wanted.data(), wanted.size());
  return std::make_unique<cuda::PeerInbox>(wanted);
}

template <class T>
uintptr_t address_of(const T& memory) {
  return reinterpret_cast<uintptr_t>(memory.data());
}

}  // namespace

void bind_cuda_peers(py::module_& m) {
  py::class_<cuda::Inbox>(m, "CudaInbox", "Zeroed memory of the current GPU that other processes can open.")
      .def(py::init(&make_inbox), py::arg("bytes"))
      .def_property_readonly("address", &address_of<cuda::Inbox>)
      .def("handle", [](const cuda::Inbox& inbox) { return handle_of(inbox); });
  py::class_<cuda::PeerInbox>(m, "CudaPeerInbox", "Another process's inbox, as the current GPU reaches it.")
      .def(py::init([](const py::bytes& handle) { return open_inbox(handle); }), py::arg("handle"))
      .def_property_readonly("address", &address_of<cuda::PeerInbox>);
  py::class_<Word>(m, "CudaWord", "8 bytes of shared memory that the ranks' hosts and GPUs see, zero at first.")
      .def(py::init(&make_word), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("seconds"))
      .def("view", &Word::view, "To be used no longer than the word.");
  m.def("cuda_bus_id", &cuda::bus_id, "The PCI bus id of the current GPU.");
  m.def("cuda_reaches", &cuda::reaches, py::arg("bus_id"), "Whether the current GPU reaches that one's memory.");
}

}  // namespace swiftspec::binding
