// The LL protocol (common/ll.h) between GPUs: each launch is one epoch. For host code and device code, with the
// template parameters `Memory` and `Wait` of ll.h. ll.cuh loads and stores lines on a GPU.
//
// A kernel may start before the previous one has ended, but sends only after it has waited for that end, so two slots
// would be enough; four slots also tolerate a kernel that sends an epoch early (tests/native/ll_model.cpp).
//
// Sums are one-shot or two-shot. One-shot: every rank sends its lines to all ranks, and each rank sums them. Two-shot:
// every strip of the product has an owner. All ranks send their lines of the strip to the owner, which sums them in the
// same order and sends the sums to all. A thread sends all of its lines, then the sums of the strips that its rank
// owns, and only then waits for other sums. So nobody waits for an owner that waits for a sum.
//
// Both steps use the same lines of an inbox: in one epoch the line from rank w to rank r is a summand if r is the
// owner, the sum if w is, and unused otherwise. The slots are as many as for one-shot sums: a rank that has finished a
// two-shot epoch has the lines that every rank sent in it, or a sum of an owner that had them.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/ll.h"

namespace swiftspec::cuda {

constexpr int kMaxPeers = 8;
SWIFTSPEC_HD constexpr ll::ProtocolParams protocol_params() { return {4}; }

// A rank's endpoint of a group. Addresses are valid on this rank. The ranks of a group make the same launches in the
// same order, each on one stream.
struct Channel {
  ll::Layout layout;  // one block
  int32_t rank;
  ll::Line* inbox[kMaxPeers];  // inbox[r] is what rank r reads
  uint64_t* epoch;             // of the next launch; device memory, as is `done`
  uint32_t* done;              // number of CTAs of this launch that have finished
  // [2], in pinned memory that all ranks see: 0, or the fault that made a rank abort (ll::Fault); the milliseconds after
  // which a waiting kernel aborts, which hosts may change while graphs exist
  uint64_t* error_word;
  bool two_shot = false;  // the same on all ranks
};

// The ranks from `first` to the one before `end`.
struct Peers {
  int first, end;
  SWIFTSPEC_HD bool contains(int rank) const { return first <= rank && rank < end; }
};

// A thread's part of an exchange. Lines are sent to all ranks including this one, so a thread does not have to keep its
// own payload for the sum.
template <class Memory>
struct Session {
  const Channel& channel;
  uint64_t epoch;

  SWIFTSPEC_HD ll::Line& line_at(int reader, int writer, int64_t line) const {
    return channel
        .inbox[reader][channel.layout.index(writer, ll::slot_of(epoch, protocol_params()), 0, line, protocol_params())];
  }

  SWIFTSPEC_HD void broadcast(int64_t line, uint64_t payload) const { send(everyone(), line, payload); }

  SWIFTSPEC_HD void send(Peers to, int64_t line, uint64_t payload) const {
    SWIFTSPEC_NO_UNROLL  // otherwise linear_kernel spills on some architectures
    for (int peer = to.first; peer < to.end; ++peer) {
      ll::write_line<Memory>(line_at(peer, channel.rank, line), ll::flag_of(epoch, protocol_params()), payload);
    }
  }

  SWIFTSPEC_HD Peers everyone() const { return {0, channel.layout.ranks}; }

  // Whether sums of this epoch are two-shot. In a cleaning epoch they are not, so that every line is written.
  SWIFTSPEC_HD bool two_shot() const {
    return channel.two_shot && !ll::is_cleaning_epoch(epoch, protocol_params());
  }

  // The ranks that sum the lines of a strip. Neighbouring strips, which lie in different CTAs, have different owners.
  SWIFTSPEC_HD Peers owners(int strip) const {
    if (!two_shot()) return everyone();
    const int owner = strip % channel.layout.ranks;
    return {owner, owner + 1};
  }
  SWIFTSPEC_HD bool owns(int strip) const { return owners(strip).contains(channel.rank); }

  // Receives this line from these ranks. All are loaded before any is checked, so that their latencies overlap. Returns
  // false if the wait gave up.
  template <class Wait>
  SWIFTSPEC_HD bool collect(Peers from, int64_t line, uint64_t (&payload)[kMaxPeers], Wait& wait) const {
    const uint32_t flag = ll::flag_of(epoch, protocol_params());
    for (;;) {
      ll::Line seen[kMaxPeers];
      SWIFTSPEC_UNROLL
      for (int r = 0; r < kMaxPeers; ++r) {
        if (from.contains(r)) seen[r] = Memory::load(line_at(channel.rank, r, line));
      }
      int missing = -1;
      SWIFTSPEC_UNROLL
      for (int r = 0; r < kMaxPeers; ++r) {
        if (from.contains(r) && !ll::parse_line(seen[r], flag, payload[r])) missing = r;
      }
      if (missing < 0) return true;
      if (!wait.keep_waiting(missing)) return false;
    }
  }

  // The sum of this line's four bf16 values over all ranks, in rank order, rounded once. In a two-shot sum the owner of
  // the strip sends it to all ranks, and overwrites its own summand; a thread calls this first for strips that its rank
  // owns. Returns false if the wait gave up.
  template <class Wait>
  SWIFTSPEC_HD bool reduce(int strip, int64_t line, uint64_t& total, Wait& wait) const {
    const bool mine = owns(strip);
    const Peers from = mine ? everyone() : owners(strip);
    uint64_t payload[kMaxPeers];
    if (!collect(from, line, payload, wait)) return false;
    total = sum(from, payload);  // a sum of one rank is what it sent, since no sum is -0
    if (mine && two_shot()) broadcast(line, total);
    return true;
  }

  // A thread's share of cleaning, at the end of a launch that sent `used` lines; see ll::is_cleaning_epoch.
  SWIFTSPEC_HD void clean(int64_t used, int64_t thread, int64_t threads) const {
    if (!ll::is_cleaning_epoch(epoch, protocol_params())) return;
    for (int64_t line = used + thread; line < channel.layout.lines; line += threads) broadcast(line, 0);
  }

 private:
  SWIFTSPEC_HD uint64_t sum(Peers from, const uint64_t (&payload)[kMaxPeers]) const {
    float sums[4] = {0, 0, 0, 0};  // 0 + x equals x, except for the sign of a zero
    SWIFTSPEC_UNROLL
    for (int r = 0; r < kMaxPeers; ++r) {
      if (!from.contains(r)) continue;
      for (int i = 0; i < 4; ++i) sums[i] += ll::Bfloat16::widen(static_cast<uint16_t>(payload[r] >> 16 * i));
    }
    uint64_t total = 0;
    for (int i = 0; i < 4; ++i) total |= static_cast<uint64_t>(ll::Bfloat16::round(sums[i])) << 16 * i;
    return total;
  }
};

// A message of `count` 4-byte words as lines: two words per line, zero-padded.
SWIFTSPEC_HD int64_t word_lines(int64_t count) { return (count + 1) / 2; }
SWIFTSPEC_HD int64_t words_of_lines(int64_t lines) { return 2 * lines; }

SWIFTSPEC_HD uint64_t load_words(const uint32_t* words, int64_t count, int64_t line) {
  const uint64_t high = 2 * line + 1 < count ? words[2 * line + 1] : 0;
  return high << 32 | words[2 * line];
}

SWIFTSPEC_HD void store_words(uint32_t* words, int64_t count, int64_t line, uint64_t payload) {
  words[2 * line] = static_cast<uint32_t>(payload);
  if (2 * line + 1 < count) words[2 * line + 1] = static_cast<uint32_t>(payload >> 32);
}

// A thread's share of an all-gather of a message, or of a chunk of it.
struct Gather {
  const uint32_t* mine;  // [count]
  uint32_t* out;         // [ranks, stride], of which the first `count` of each rank are written
  int64_t count, stride;

  template <class Memory>
  SWIFTSPEC_HD void send(const Session<Memory>& session, int64_t thread, int64_t threads) const {
    for (int64_t line = thread; line < word_lines(count); line += threads) {
      session.broadcast(line, load_words(mine, count, line));
    }
  }

  // To be called after `send` of the same thread, independently of the progress of other ranks.
  template <class Memory, class Wait>
  SWIFTSPEC_HD bool receive(const Session<Memory>& session, int64_t thread, int64_t threads, Wait& wait) const {
    for (int64_t line = thread; line < word_lines(count); line += threads) {
      uint64_t payload[kMaxPeers];
      if (!session.collect(session.everyone(), line, payload, wait)) return false;
      SWIFTSPEC_UNROLL
      for (int r = 0; r < kMaxPeers; ++r) {
        if (r < session.channel.layout.ranks) store_words(out + r * stride, count, line, payload[r]);
      }
    }
    return true;
  }
};

}  // namespace swiftspec::cuda
