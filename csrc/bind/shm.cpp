// Groups and mailboxes over shared memory, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bind/arguments.h"
#include "host/decoder/fast_reply.h"
#include "host/shm/ll_shm.h"

namespace swiftspec::binding {

namespace {

// Ctrl-C reaches a rank that waits. True: a Python exception is set.
bool interrupted() {
  const py::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

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

void mailbox_send(host::Mailbox& mailbox, const std::vector<int32_t>& words, double seconds) {
  py::gil_scoped_release unlocked;
  mailbox.send(words.data(), static_cast<int64_t>(words.size()), seconds);
}

// `pause`: how long the rest of a message may take.
std::vector<int32_t> mailbox_recv(host::Mailbox& mailbox, double seconds, double pause) {
  py::gil_scoped_release unlocked;
  std::vector<int32_t> words(static_cast<size_t>(mailbox.wait(seconds)));
  mailbox.take(words.data(), static_cast<int64_t>(words.size()), pause);
  return words;
}

// As `mailbox_recv`, and answers what is offered: a result, which follows the kind `asks`, by the kind `answers`, the
// word `note` and the proposal. The second value: whether it did.
std::pair<host::Words, bool> mailbox_recv_or_answer(host::Mailbox& mailbox, const host::Offer& offer, int32_t asks,
                                                    int32_t answers, int32_t note, double seconds, double pause) {
  py::gil_scoped_release unlocked;
  host::Words words(static_cast<size_t>(mailbox.wait(seconds)));
  mailbox.take(words.data(), static_cast<int64_t>(words.size()), pause);
  if (words.empty() || words[0] != asks) return {std::move(words), false};
  host::Words proposal = host::answer(offer, {words.begin() + 1, words.end()});
  if (proposal.empty()) return {std::move(words), false};
  proposal.insert(proposal.begin(), {answers, note});
  mailbox.send(proposal.data(), static_cast<int64_t>(proposal.size()), pause);
  return {std::move(words), true};
}

std::unique_ptr<host::Group> make_group(const std::string& name, int rank, int size, int64_t capacity, double seconds,
                                        bool spin) {
  check(size >= 1 && size <= swiftspec::ll::kMaxRanks && rank >= 0 && rank < size, "1 to 16 ranks, 0 <= rank < size");
  size_arg("capacity", capacity, 8);
  py::gil_scoped_release unlocked;
  return std::make_unique<host::Group>(name, rank, size, capacity, seconds, host::Patience{spin, &interrupted});
}

std::unique_ptr<host::Mailbox> make_mailbox(const std::string& name, int side, int64_t words, double seconds,
                                            bool spin) {
  check(side == 0 || side == 1, "side must be 0 or 1");
  size_arg("words", words, 1);
  py::gil_scoped_release unlocked;
  return std::make_unique<host::Mailbox>(name, side, words, seconds, host::Patience{spin, &interrupted});
}

void raise_shared_memory(std::exception_ptr error) {
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

void define_shared_memory(py::module_& m) {
  py::register_exception_translator(&raise_shared_memory);
  py::class_<host::Group>(m, "Group", "Collectives over shared memory; see Group in host/ll_shm.h. Times in seconds.")
      .def(py::init(&make_group), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("capacity"),
           py::arg("seconds"), py::arg("spin"))
      .def("all_reduce", &all_reduce, py::arg("x"), py::arg("count"), py::arg("element"), py::arg("seconds"))
      .def("all_gather", &all_gather, py::arg("x"), py::arg("bytes"), py::arg("out"), py::arg("seconds"))
      .def("leave", &host::Group::leave);
  py::class_<host::Mailbox>(m, "Mailbox", "Messages of int32 words over shared memory; see Mailbox in host/ll_shm.h.")
      .def(py::init(&make_mailbox), py::arg("name"), py::arg("side"), py::arg("words"), py::arg("seconds"),
           py::arg("spin"))
      .def("send", &mailbox_send, py::arg("words"), py::arg("seconds"))
      .def("recv", &mailbox_recv, py::arg("seconds"), py::arg("pause"))
      .def("recv_or_answer", &mailbox_recv_or_answer, py::arg("offer"), py::arg("asks"), py::arg("answers"),
           py::arg("note"), py::arg("seconds"), py::arg("pause"))
      .def("leave", &host::Mailbox::leave);
}

}  // namespace swiftspec::binding
