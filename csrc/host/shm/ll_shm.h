// LL between the ranks of one machine, over shared memory. One thread at a time uses an object. A wait throws TimedOut,
// PeerLost or Interrupted.
#pragma once

#include <cstdint>
#include <string>

#include "host/shm/ring.h"
#include "host/shm/segment.h"

namespace swiftspec::host {

enum class Element { kFloat32, kFloat64, kBfloat16 };

// Collectives among `size` ranks. All ranks make the same calls with the same sizes. A message longer than `capacity`
// bytes goes in several epochs. Once a call has thrown, the group is of no more use and every rank is told.
class Group {
 public:
  Group(const std::string& name, int rank, int size, int64_t capacity, double attach_seconds,
        const Patience& patience);

  // In place; sums in the order of the ranks, bfloat16 in float32 and rounded once.
  void all_reduce(void* x, int64_t count, Element element, double seconds);
  void all_gather(const void* x, int64_t bytes, void* out, double seconds);  // out [size, bytes]
  void leave() { segment_.leave(); }
  int size() const { return layout_.ranks; }
  int rank() const { return session_.rank; }

 private:
  template <class E>
  bool reduce(uint8_t* x, int64_t bytes, Waiter& wait);
  bool gather(const uint8_t* x, int64_t bytes, uint8_t* out, Waiter& wait);
  void check_usable() const;
  [[noreturn]] void give_up(const Waiter& wait);
  std::string describe(const ll::Trouble& trouble) const;

  ll::Layout layout_;
  Segment segment_;
  ll::Session<Memory> session_;
  std::string broken_;  // why nothing more can be done
};

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
