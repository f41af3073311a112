#include "host/shm/mailbox.h"

#include <stdexcept>

namespace swiftspec::host {

// Layout: the ring of side 0, the ring of side 1, then the counter of consumed lines of each.
Mailbox::Mailbox(const std::string& name, int side, int64_t words, double attach_timeout_s, const WaitPolicy& policy)
    : lines_((ll::lines_for(4 * words) + 3) / 4 * 4),
      segment_(name, side, 2, 2 * (static_cast<size_t>(lines_) * sizeof(ll::Line) + kCounterBytes), attach_timeout_s,
               policy),
      out_(ring(side)),
      in_(ring(1 - side)) {}

Ring Mailbox::ring(int writer) const {
  const size_t bytes = static_cast<size_t>(lines_) * sizeof(ll::Line);
  uint8_t* data = segment_.data();
  return {reinterpret_cast<ll::Line*>(data + writer * bytes), lines_,
          reinterpret_cast<uint64_t*>(data + 2 * bytes + writer * kCounterBytes)};
}

void Mailbox::send(const int32_t* words, int64_t n, double timeout_s) {
  check_usable();
  const int other = 1 - segment_.rank();
  if (segment_.has_left(other)) throw PeerLost("the other side has closed the mailbox");
  Waiter wait(segment_, timeout_s);
  bool torn = false;
  if (!out_.put(words, n, other, torn, wait)) throw_error(wait, "the mailbox stayed full", torn);
}

int32_t Mailbox::wait(double timeout_s) {
  check_usable();
  Waiter wait(segment_, timeout_s);
  if (!in_.length(pending_, 1 - segment_.rank(), wait)) throw_error(wait, "no message", false);
  return pending_;
}

void Mailbox::take(int32_t* words, int64_t n, double timeout_s) {
  check_usable();
  if (n != pending_) throw std::invalid_argument("take what wait has announced");
  Waiter wait(segment_, timeout_s);
  pending_ = -1;
  if (!in_.take(words, n, 1 - segment_.rank(), wait)) throw_error(wait, "the rest of a message did not come", true);
}

void Mailbox::check_usable() const {
  if (torn_) throw PeerLost("the mailbox is broken: a message was cut short");
}

void Mailbox::throw_error(const Waiter& wait, const char* what, bool torn) {
  torn_ = torn;
  if (torn) leave();
  const std::string other =
      "the other side of the mailbox (process " + std::to_string(segment_.pid(wait.source())) + ")";
  switch (wait.reason()) {
    case ll::Reason::kTimeout: throw TimedOut(what + (" for " + wait.limit()));
    case ll::Reason::kInterrupted: throw Interrupted();
    case ll::Reason::kEnded: throw PeerLost(other + " has ended");
    default: throw PeerLost(other + " has closed it");
  }
}

}  // namespace swiftspec::host
