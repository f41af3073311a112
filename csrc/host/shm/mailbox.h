// Messages between two processes of one machine over shared memory. Not thread-safe. Waits throw TimedOut, PeerLost or
// Interrupted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "host/shm/ring.h"
#include "host/shm/segment.h"

namespace swiftspec::host {

// Bidirectional channel of int32 messages between two sides, with one ring of `words` words per direction. `send`
// returns immediately while the ring has space. A call that timed out may be repeated.
class Mailbox {
 public:
  Mailbox(const std::string& name, int side, int64_t words, double attach_timeout_s, const WaitPolicy& policy);

  void send(const int32_t* words, int64_t n, double timeout_s);
  int32_t wait(double timeout_s);                          // waits for a message; returns its number of words
  void take(int32_t* words, int64_t n, double timeout_s);  // reads the message that `wait` returned
  void leave() { segment_.leave(); }

 private:
  static constexpr size_t kCounterBytes = 64;

  Ring ring(int writer) const;
  void check_usable() const;
  [[noreturn]] void throw_error(const Waiter& wait, const char* what, bool torn);

  int64_t lines_;
  Segment segment_;
  Ring out_, in_;
  int32_t pending_ = -1;  // length of the message that `wait` returned
  bool torn_ = false;     // a message was truncated, so no other can follow
};

}  // namespace swiftspec::host
