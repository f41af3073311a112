// One direction of a mailbox: messages of 32-bit words through a ring of LL lines, one writer and one reader. The flag
// of a line is that of its lap, so the data announces itself; the reader says how far it is only to give room.
#pragma once

#include <cstdint>

#include "common/ll.h"
#include "host/shm/atomic.h"

namespace swiftspec::host {

class Ring {
 public:
  // `lines` [count] and `taken` are shared and start as zeros; `next` is the first line in use (tests start late).
  Ring(ll::Line* lines, int64_t count, uint64_t* taken, uint64_t next = 0)
      : lines_(lines), count_(static_cast<uint64_t>(count)), taken_(taken), next_(next), room_(next + count_) {}

  // Writes a message. False: the wait gave up; if `torn`, in the middle of a message longer than the ring. A message
  // that fits is not begun before there is room for all of it.
  template <class Wait>
  bool put(const int32_t* words, int64_t n, int reader, bool& torn, Wait& wait) {
    const auto lines = static_cast<uint64_t>(ll::lines_for(4 * (n + 1)));
    torn = false;
    if (!make_room(lines < count_ ? lines : count_, reader, wait)) return false;
    write(static_cast<uint32_t>(n), n > 0 ? word(words[0]) : 0);
    for (int64_t i = 1; i < n; i += 2) {
      if (next_ == room_ && !make_room(1, reader, wait)) return !(torn = true);
      write(word(words[i]), i + 1 < n ? word(words[i + 1]) : 0);
    }
    return true;
  }

  // Waits for a message: its number of words. Asked again before `take`, it says the same.
  template <class Wait>
  bool length(int32_t& n, int writer, Wait& wait) {
    uint64_t payload;
    if (!read(payload, writer, wait)) return false;
    n = static_cast<int32_t>(payload);
    return true;
  }

  // Takes the message that `length` has announced.
  template <class Wait>
  bool take(int32_t* words, int64_t n, int writer, Wait& wait) {
    uint64_t payload;
    for (int64_t i = -1; i < n; i += 2) {
      if (!read(payload, writer, wait)) return false;
      if (i >= 0) words[i] = static_cast<int32_t>(payload);
      if (i + 1 < n) words[i + 1] = static_cast<int32_t>(payload >> 32);
      if (++next_ % (count_ / 4) == 0) store(*taken_, next_);  // room for a writer in the middle of a long message
    }
    store(*taken_, next_);
    return true;
  }

 private:
  static uint32_t word(int32_t x) { return static_cast<uint32_t>(x); }

  template <class Wait>
  bool make_room(uint64_t lines, int reader, Wait& wait) {
    if (next_ + lines <= room_) return true;
    wait.rest();
    for (bool on = true; on; on = wait.again(reader)) {
      room_ = load(*taken_) + count_;
      if (next_ + lines <= room_) return true;
    }
    return false;
  }

  void write(uint32_t low, uint32_t high) {
    ll::put<Memory>(lines_[next_ % count_], ll::flag_of(next_ / count_), static_cast<uint64_t>(high) << 32 | low);
    ++next_;
  }

  template <class Wait>
  bool read(uint64_t& payload, int writer, Wait& wait) {
    return ll::await<Memory>(lines_[next_ % count_], ll::flag_of(next_ / count_), writer, payload, wait);
  }

  ll::Line* lines_;
  uint64_t count_;  // a multiple of 4
  uint64_t* taken_;
  uint64_t next_;  // line to write or read
  uint64_t room_;  // the writer may go up to here
};

}  // namespace swiftspec::host
