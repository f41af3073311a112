// Mailbox over shared memory.
#include "host/shm/mailbox.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/arguments.h"
#include "bind/module.h"
#include "host/decoder/fast_reply.h"

namespace swiftspec::binding {

namespace {

void send(host::Mailbox& mailbox, const std::vector<int32_t>& words, double timeout_s) {
  py::gil_scoped_release unlocked;
  mailbox.send(words.data(), static_cast<int64_t>(words.size()), timeout_s);
}

// `message_timeout_s`: limit of each wait within a message.
std::vector<int32_t> recv(host::Mailbox& mailbox, double timeout_s, double message_timeout_s) {
  py::gil_scoped_release unlocked;
  std::vector<int32_t> words(static_cast<size_t>(mailbox.wait(timeout_s)));
  mailbox.take(words.data(), static_cast<int64_t>(words.size()), message_timeout_s);
  return words;
}

// As `recv`, but answers a message [result, ...] with [proposal, note, ...] if `state` has a reply. The second value is
// whether it did.
std::pair<host::Words, bool> recv_or_reply(host::Mailbox& mailbox, const host::FastReply& state, int32_t result,
                                           int32_t proposal, int32_t note, double timeout_s, double message_timeout_s) {
  py::gil_scoped_release unlocked;
  host::Words words(static_cast<size_t>(mailbox.wait(timeout_s)));
  mailbox.take(words.data(), static_cast<int64_t>(words.size()), message_timeout_s);
  if (words.empty() || words[0] != result) return {std::move(words), false};
  host::Words reply = host::fast_reply(state, {words.begin() + 1, words.end()});
  if (reply.empty()) return {std::move(words), false};
  reply.insert(reply.begin(), {proposal, note});
  mailbox.send(reply.data(), static_cast<int64_t>(reply.size()), message_timeout_s);
  return {std::move(words), true};
}

std::unique_ptr<host::Mailbox> make_mailbox(const std::string& name, int side, int64_t words, double timeout_s,
                                            bool spin) {
  check(side == 0 || side == 1, "side must be 0 or 1");
  size_arg("words", words, 1);
  py::gil_scoped_release unlocked;
  return std::make_unique<host::Mailbox>(name, side, words, timeout_s, host::WaitPolicy{spin, &interrupted});
}

}  // namespace

void bind_mailbox(py::module_& m) {
  py::class_<host::Mailbox>(m, "Mailbox",
                            "Messages of int32 words over shared memory; see Mailbox in host/shm/mailbox.h.")
      .def(py::init(&make_mailbox), py::arg("name"), py::arg("side"), py::arg("words"), py::arg("timeout_s"),
           py::arg("spin"))
      .def("send", &send, py::arg("words"), py::arg("timeout_s"),
           "Sends a message. Waits up to `timeout_s` while the mailbox is full.")
      .def("recv", &recv, py::arg("timeout_s"), py::arg("message_timeout_s"),
           "Receives a message. `message_timeout_s` limits the waits within it.")
      .def("recv_or_reply", &recv_or_reply, py::arg("state"), py::arg("result"), py::arg("proposal"), py::arg("note"),
           py::arg("timeout_s"), py::arg("message_timeout_s"),
           "As `recv`, but immediately answers a message [result, ...] with [proposal, note, ...] if `state` has a "
           "reply. The second value is whether it did.")
      .def("leave", &host::Mailbox::leave, "Announces that this side sends no more. Sent messages stay readable.");
}

}  // namespace swiftspec::binding
