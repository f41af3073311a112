// Messages between two processes of one machine, over shared memory. One thread at a time uses a mailbox. A wait throws
// TimedOut, PeerLost or Interrupted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "host/shm/ring.h"
#include "host/shm/segment.h"

namespace swiftspec::host {

// Messages of int32 words between two sides, in both directions, each through a ring of `words` words. A message that
// finds room is sent at once, any number of them may be under way. A wait that ran out of time may be tried again.
class Mailbox {
 public:
  Mailbox(const std::string& name, int side, int64_t words, double attach_seconds, const Patience& patience);

  void send(const int32_t* words, int64_t n, double seconds);
  int32_t wait(double seconds);                          // for a message: its number of words
  void take(int32_t* words, int64_t n, double seconds);  // the message that `wait` has announced
  void leave() { segment_.leave(); }

 private:
  static constexpr size_t kTakenBytes = 64;

  Ring ring(int writer) const;
  void check_usable() const;
  [[noreturn]] void give_up(const Waiter& wait, const char* what, bool torn);

  int64_t lines_;
  Segment segment_;
  Ring out_, in_;
  int32_t pending_ = -1;  // words of the message that `wait` has announced
  bool torn_ = false;     // a message was cut short, so nothing can follow it
};

}  // namespace swiftspec::host
