// One direction of a mailbox: a single-producer, single-consumer ring of LL lines that carries messages of 32-bit
// words. The flag of a line is its lap number, so the data announces itself; the reader's counter only frees space.
#pragma once

#include <cstdint>

#include "common/ll.h"
#include "host/shm/atomic.h"

namespace swiftspec::host {

class Ring {
 public:
  // `lines` [count] and `consumed` are shared and start as zeros. `next`: first line in use (not 0 in tests).
  Ring(ll::Line* lines, int64_t count, uint64_t* consumed, uint64_t next = 0)
      : lines_(lines), count_(static_cast<uint64_t>(count)), consumed_(consumed), next_(next), limit_(next + count_) {}

  // Writes a message. Returns false if the wait gave up; then `torn` is set if part of the message was written, which
  // happens only to a message longer than the ring.
  template <class Wait>
  bool put(const int32_t* words, int64_t n, int reader, bool& torn, Wait& wait) {
    const auto lines = static_cast<uint64_t>(ll::lines_for(4 * (n + 1)));
    torn = false;
    if (!wait_for_space(lines < count_ ? lines : count_, reader, wait)) return false;
    write(static_cast<uint32_t>(n), n > 0 ? word(words[0]) : 0);
    for (int64_t i = 1; i < n; i += 2) {
      if (next_ == limit_ && !wait_for_space(1, reader, wait)) return !(torn = true);
      write(word(words[i]), i + 1 < n ? word(words[i + 1]) : 0);
    }
    return true;
  }

  // Waits for a message and returns its number of words; may be repeated before `take`.
  template <class Wait>
  bool length(int32_t& n, int writer, Wait& wait) {
    uint64_t payload;
    if (!read(payload, writer, wait)) return false;
    n = static_cast<int32_t>(payload);
    return true;
  }

  // Reads the message whose length was returned.
  template <class Wait>
  bool take(int32_t* words, int64_t n, int writer, Wait& wait) {
    uint64_t payload;
    for (int64_t i = -1; i < n; i += 2) {
      if (!read(payload, writer, wait)) return false;
      if (i >= 0) words[i] = static_cast<int32_t>(payload);
      if (i + 1 < n) words[i + 1] = static_cast<int32_t>(payload >> 32);
      if (++next_ % (count_ / 4) == 0) store(*consumed_, next_);  // a writer of a long message waits for space
    }
    store(*consumed_, next_);
    return true;
  }

 private:
  static uint32_t word(int32_t x) { return static_cast<uint32_t>(x); }

  template <class Wait>
  bool wait_for_space(uint64_t lines, int reader, Wait& wait) {
    if (next_ + lines <= limit_) return true;
    wait.begin();
    for (bool on = true; on; on = wait.keep_waiting(reader)) {
      limit_ = load(*consumed_) + count_;
      if (next_ + lines <= limit_) return true;
    }
    return false;
  }

  void write(uint32_t low, uint32_t high) {
    ll::write_line<Memory>(lines_[next_ % count_], ll::flag_of(next_ / count_), static_cast<uint64_t>(high) << 32 | low);
    ++next_;
  }

  template <class Wait>
  bool read(uint64_t& payload, int writer, Wait& wait) {
    return ll::poll_line<Memory>(lines_[next_ % count_], ll::flag_of(next_ / count_), writer, payload, wait);
  }

  ll::Line* lines_;
  uint64_t count_;  // a multiple of 4
  uint64_t* consumed_;
  uint64_t next_;   // line to write or read
  uint64_t limit_;  // the writer may write lines before this one
};

}  // namespace swiftspec::host
