// The LL protocol (SwiftSpec paper, section 3.3, after NCCL's "low latency" protocol): every 8 bytes in memory are 4
// bytes of data and a 32-bit flag, written and read as one. A reader polls for the flag of its epoch and then has the
// data, so an exchange needs neither a barrier nor a second message. Host code and CUDA kernels share this file: the
// template parameter `Memory` loads and stores lines, `Wait` is called between two polls.
//
// Epochs. All ranks of a group number their exchanges (epochs) identically. In an exchange each rank sends at least one
// line to every other rank and receives all lines that they send. The lines from one rank to another lie in a few slots
// that are used cyclically and never cleared. Two slots are enough if a rank sends for epoch e + 1 only after
// everything of epoch e has arrived: a peer whose line of epoch e + 1 has arrived has finished epoch e, and that line
// must have arrived before epoch e + 2 overwrites the slot of epoch e. So a fast rank may be one epoch ahead of a slow
// one. Ranks that send for e + 1 while they still receive e need four slots: then a line of e + 1 proves only that its
// sender has finished e - 1. tests/native/ll_model.cpp enumerates every interleaving: one slot fails, two pass; with
// the early sends three fail, four pass.
//
// Blocks. Block b of a rank exchanges lines with block b of the other ranks only; each block follows the protocol on
// its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace swiftspec::ll {

constexpr int kMaxRanks = 16;
constexpr int64_t kLineBytes = 8;  // payload of a line

// Two halves, each with its own flag: only 8-byte stores must be atomic.
struct alignas(16) Line {
  uint64_t half[2];
};

// Constants of the protocol. CUDA kernels use four slots (cuda/peers/channel.h), the model checker also other values.
struct ProtocolParams {
  uint32_t num_slots = 2;
  uint64_t num_flags = 0xffffffffu;         // number of flag values, 1 to 2^32 - 1
  uint64_t cleaning_interval = 1ull << 30;    // epochs; at most num_flags / 2
};

// The flag of an epoch: never 0, which is the content of fresh memory. A value recurs after num_flags epochs.
SWIFTSPEC_HD uint32_t flag_of(uint64_t epoch, const ProtocolParams& params = {}) {
  return static_cast<uint32_t>(1 + epoch % params.num_flags);
}

SWIFTSPEC_HD uint32_t slot_of(uint64_t epoch, const ProtocolParams& params = {}) {
  return static_cast<uint32_t>(epoch % params.num_slots);
}

// Whether a sender writes every line of its slot in this epoch. Messages differ in length, so the last lines of a slot
// may keep a flag until its value recurs, and would then be taken for new. A line cleaned in epoch e holds the flag of
// e, so cleaning once per cycle of the flags is not enough.
SWIFTSPEC_HD bool is_cleaning_epoch(uint64_t epoch, const ProtocolParams& params = {}) {
  return epoch % params.cleaning_interval < params.num_slots;
}

SWIFTSPEC_HD uint64_t pack(uint32_t data, uint32_t flag) { return static_cast<uint64_t>(flag) << 32 | data; }
SWIFTSPEC_HD uint32_t data_of(uint64_t half) { return static_cast<uint32_t>(half); }
SWIFTSPEC_HD bool ready(uint64_t half, uint32_t flag) { return static_cast<uint32_t>(half >> 32) == flag; }

SWIFTSPEC_HD int64_t lines_for(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes; }

// Layout of the inbox of one rank: [source rank][slot][block][line].
struct Layout {
  int32_t ranks;
  int32_t blocks;
  int64_t lines;  // of the longest message of a block

  SWIFTSPEC_HD int64_t inbox_lines(const ProtocolParams& params = {}) const {
    return ranks * params.num_slots * blocks * lines;
  }
  SWIFTSPEC_HD int64_t index(int source, uint32_t slot, int block, int64_t line,
                             const ProtocolParams& params = {}) const {
    return ((static_cast<int64_t>(source) * params.num_slots + slot) * blocks + block) * lines + line;
  }
};

// Why a rank aborted an exchange, packed into 64 bits of memory that all ranks can see; 0 means no fault.
enum class Reason : uint8_t { kNone, kTimeout, kEnded, kLeft, kInterrupted };

struct Fault {
  Reason reason;
  uint8_t rank;    // the rank that aborted
  uint8_t source;  // the rank from which it was waiting for a line
  uint8_t slot;
  uint32_t epoch;  // low 32 bits
};

SWIFTSPEC_HD uint64_t encode_fault(const Fault& fault) {
  return static_cast<uint64_t>(fault.reason) << 56 | static_cast<uint64_t>(fault.rank) << 48 |
         static_cast<uint64_t>(fault.source) << 40 | static_cast<uint64_t>(fault.slot) << 32 | fault.epoch;
}

SWIFTSPEC_HD Fault decode_fault(uint64_t word) {
  return {static_cast<Reason>(word >> 56), static_cast<uint8_t>(word >> 48), static_cast<uint8_t>(word >> 40),
          static_cast<uint8_t>(word >> 32), static_cast<uint32_t>(word)};
}

// Element types of the payload of a line: summed in `Sum`, rounded once to `Value`.
struct Float32 {
  using Value = float;
  using Sum = float;
  SWIFTSPEC_HD static Sum widen(Value x) { return x; }
  SWIFTSPEC_HD static Value round(Sum x) { return x; }
};

struct Float64 {
  using Value = double;
  using Sum = double;
  SWIFTSPEC_HD static Sum widen(Value x) { return x; }
  SWIFTSPEC_HD static Value round(Sum x) { return x; }
};

struct Bfloat16 {
  using Value = uint16_t;
  using Sum = float;
  SWIFTSPEC_HD static Sum widen(Value x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
  }
  SWIFTSPEC_HD static Value round(Sum x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return static_cast<Value>(bits >> 16 | 0x40);
    return static_cast<Value>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

// Extracts the payload of a loaded line; false if one of the halves does not carry the flag.
SWIFTSPEC_HD bool parse_line(const Line& seen, uint32_t flag, uint64_t& payload) {
  if (!ready(seen.half[0], flag) || !ready(seen.half[1], flag)) return false;
  payload = static_cast<uint64_t>(data_of(seen.half[1])) << 32 | data_of(seen.half[0]);
  return true;
}

// Loads a line and parses it like parse_line.
template <class Memory>
SWIFTSPEC_HD bool try_read(const Line& line, uint32_t flag, uint64_t& payload) {
  return parse_line(Memory::load(line), flag, payload);
}

template <class Memory>
SWIFTSPEC_HD void write_line(Line& line, uint32_t flag, uint64_t payload) {
  Memory::store(line, {{pack(static_cast<uint32_t>(payload), flag), pack(static_cast<uint32_t>(payload >> 32), flag)}});
}

// Polls one line until it carries the flag. Calls `wait.begin()` after the first failed poll and
// `wait.keep_waiting(source)` after each further one. If the latter returns false, there is one last poll, since a rank
// may end right after it has sent. Returns false if that fails, too.
template <class Memory, class Wait>
SWIFTSPEC_HD bool poll_line(const Line& line, uint32_t flag, int source, uint64_t& payload, Wait& wait) {
  if (try_read<Memory>(line, flag, payload)) return true;
  wait.begin();
  while (!try_read<Memory>(line, flag, payload)) {
    if (!wait.keep_waiting(source)) return try_read<Memory>(line, flag, payload);
  }
  return true;
}

// The exchanges of one block of one rank. In each epoch: send or broadcast lines, receive or reduce them, finish.
template <class Memory>
struct Session {
  Layout layout;
  int rank;
  int block;
  uint64_t epoch;
  Line* inbox[kMaxRanks];  // inbox[r] is what rank r reads

  SWIFTSPEC_HD void send(int peer, int64_t line, uint64_t payload) const {
    write_line<Memory>(inbox[peer][layout.index(rank, slot_of(epoch), block, line)], flag_of(epoch), payload);
  }

  SWIFTSPEC_HD void broadcast(int64_t line, uint64_t payload) const {
    for (int peer = 0; peer < layout.ranks; ++peer) {
      if (peer != rank) send(peer, line, payload);
    }
  }

  template <class Wait>
  SWIFTSPEC_HD bool receive(int source, int64_t line, uint64_t& payload, Wait& wait) const {
    const Line& from = inbox[rank][layout.index(source, slot_of(epoch), block, line)];
    return poll_line<Memory>(from, flag_of(epoch), source, payload, wait);
  }

  // Sums this line over all ranks, in rank order, so that `total` is bitwise identical on every rank. Returns false if
  // the wait gave up.
  template <class Element, class Wait>
  SWIFTSPEC_HD bool reduce(int64_t line, uint64_t own, uint64_t& total, Wait& wait) const {
    constexpr int kValues = kLineBytes / sizeof(typename Element::Value);
    typename Element::Value values[kValues];
    typename Element::Sum sums[kValues] = {};
    for (int source = 0; source < layout.ranks; ++source) {
      uint64_t payload = own;
      if (source != rank && !receive(source, line, payload, wait)) return false;
      memcpy(values, &payload, sizeof payload);
      for (int i = 0; i < kValues; ++i) {
        sums[i] = source == 0 ? Element::widen(values[i]) : sums[i] + Element::widen(values[i]);
      }
    }
    for (int i = 0; i < kValues; ++i) values[i] = Element::round(sums[i]);
    memcpy(&total, values, sizeof total);
    return true;
  }

  // Ends the epoch; call it after everything of this epoch has been received. `used`: lines that were sent to each
  // peer.
  SWIFTSPEC_HD void finish(int64_t used) {
    if (is_cleaning_epoch(epoch)) {
      for (int64_t line = used; line < layout.lines; ++line) broadcast(line, 0);
    }
    ++epoch;
  }
};

}  // namespace swiftspec::ll
