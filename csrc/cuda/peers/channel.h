// The LL protocol (common/ll.h) between GPUs: each launch is one epoch. For host code and device code, with the
// template parameters `Memory` and `Wait` of ll.h. ll.cuh loads and stores lines on a GPU.
//
// A kernel may start before the previous one has ended, but sends only after it has waited for that end, so two slots
// would be enough; four slots also tolerate a kernel that sends an epoch early (tests/native/ll_model.cpp).
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

  SWIFTSPEC_HD void broadcast(int64_t line, uint64_t payload) const {
    for (int peer = 0; peer < channel.layout.ranks; ++peer) {
      ll::write_line<Memory>(line_at(peer, channel.rank, line), ll::flag_of(epoch, protocol_params()), payload);
    }
  }

  // Receives this line from every rank. All are loaded before any is checked, so that their latencies overlap. Returns
  // false if the wait gave up.
  template <class Wait>
  SWIFTSPEC_HD bool collect(int64_t line, uint64_t (&payload)[kMaxPeers], Wait& wait) const {
    const uint32_t flag = ll::flag_of(epoch, protocol_params());
    for (;;) {
      ll::Line seen[kMaxPeers];
      SWIFTSPEC_UNROLL
      for (int r = 0; r < kMaxPeers; ++r) {
        if (r < channel.layout.ranks) seen[r] = Memory::load(line_at(channel.rank, r, line));
      }
      int missing = -1;
      SWIFTSPEC_UNROLL
      for (int r = 0; r < kMaxPeers; ++r) {
        if (r < channel.layout.ranks && !ll::parse_line(seen[r], flag, payload[r])) missing = r;
      }
      if (missing < 0) return true;
      if (!wait.keep_waiting(missing)) return false;
    }
  }

  // The sum of this line's four bf16 values over all ranks, in rank order, rounded once. Returns false if the wait gave
  // up.
  template <class Wait>
  SWIFTSPEC_HD bool reduce(int64_t line, uint64_t& total, Wait& wait) const {
    uint64_t payload[kMaxPeers];
    if (!collect(line, payload, wait)) return false;
    total = sum(payload);
    return true;
  }

  // A thread's share of cleaning, at the end of a launch that sent `used` lines; see ll::is_cleaning_epoch.
  SWIFTSPEC_HD void clean(int64_t used, int64_t thread, int64_t threads) const {
    if (!ll::is_cleaning_epoch(epoch, protocol_params())) return;
    for (int64_t line = used + thread; line < channel.layout.lines; line += threads) broadcast(line, 0);
  }

 private:
  SWIFTSPEC_HD uint64_t sum(const uint64_t (&payload)[kMaxPeers]) const {
    float sums[4] = {0, 0, 0, 0};  // 0 + x equals x, except for the sign of a zero
    SWIFTSPEC_UNROLL
    for (int r = 0; r < kMaxPeers; ++r) {
      if (r >= channel.layout.ranks) continue;
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
      if (!session.collect(line, payload, wait)) return false;
      SWIFTSPEC_UNROLL
      for (int r = 0; r < kMaxPeers; ++r) {
        if (r < session.channel.layout.ranks) store_words(out + r * stride, count, line, payload[r]);
      }
    }
    return true;
  }
};

}  // namespace swiftspec::cuda
