// Messages over shared memory, for Python.
#include "host/shm/mailbox.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/arguments.h"
#include "bind/module.h"
#include "bind/waits.h"
#include "host/decoder/fast_reply.h"

namespace swiftspec::binding {

namespace {

void send(host::Mailbox& mailbox, const std::vector<int32_t>& words, double seconds) {
  py::gil_scoped_release unlocked;
  mailbox.send(words.data(), static_cast<int64_t>(words.size()), seconds);
}

// `pause`: how long the rest of a message may take.
std::vector<int32_t> recv(host::Mailbox& mailbox, double seconds, double pause) {
  py::gil_scoped_release unlocked;
  std::vector<int32_t> words(static_cast<size_t>(mailbox.wait(seconds)));
  mailbox.take(words.data(), static_cast<int64_t>(words.size()), pause);
  return words;
}

// As `recv`, but a message of the kind `result` is replied to where `ready` can: by a message of the kind `proposal`,
// the word `note` and the proposal itself. The second value: whether it was.
std::pair<host::Words, bool> recv_or_reply(host::Mailbox& mailbox, const host::FastReply& ready, int32_t result,
                                           int32_t proposal, int32_t note, double seconds, double pause) {
  py::gil_scoped_release unlocked;
  host::Words words(static_cast<size_t>(mailbox.wait(seconds)));
  mailbox.take(words.data(), static_cast<int64_t>(words.size()), pause);
  if (words.empty() || words[0] != result) return {std::move(words), false};
  host::Words reply = host::fast_reply(ready, {words.begin() + 1, words.end()});
  if (reply.empty()) return {std::move(words), false};
  reply.insert(reply.begin(), {proposal, note});
  mailbox.send(reply.data(), static_cast<int64_t>(reply.size()), pause);
  return {std::move(words), true};
}

std::unique_ptr<host::Mailbox> make_mailbox(const std::string& name, int side, int64_t words, double seconds,
                                            bool spin) {
  check(side == 0 || side == 1, "side must be 0 or 1");
  size_arg("words", words, 1);
  py::gil_scoped_release unlocked;
  return std::make_unique<host::Mailbox>(name, side, words, seconds, host::Patience{spin, &interrupted});
}

}  // namespace

void bind_mailbox(py::module_& m) {
  py::class_<host::Mailbox>(m, "Mailbox",
                            "Messages of int32 words over shared memory; see Mailbox in host/shm/mailbox.h.")
      .def(py::init(&make_mailbox), py::arg("name"), py::arg("side"), py::arg("words"), py::arg("seconds"),
           py::arg("spin"))
      .def("send", &send, py::arg("words"), py::arg("seconds"), "Waits so long where the mailbox is full.")
      .def("recv", &recv, py::arg("seconds"), py::arg("pause"),
           "The next message; `pause` bounds the waits within it.")
      .def("recv_or_reply", &recv_or_reply, py::arg("ready"), py::arg("result"), py::arg("proposal"), py::arg("note"),
           py::arg("seconds"), py::arg("pause"),
           "As `recv`, but a message [result, ...] is replied to at once where `ready` can: [proposal, note, ...]. The "
           "second value: whether it was.")
      .def("leave", &host::Mailbox::leave, "What was sent stays readable.");
}

}  // namespace swiftspec::binding
