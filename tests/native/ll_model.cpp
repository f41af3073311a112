// Model checker: explores every interleaving of a few ranks that exchange words by the rules of csrc/common/ll.h.
//
//   ll_model RANKS EPOCHS WORDS SLOTS AHEAD FLAGS CLEAN_EVERY LENGTHS TWO_SHOT
//
// In each epoch every rank sends words to every other rank, in any order, and takes theirs, in any order; one send or
// one take is one step. A word is the unit that memory writes atomically, so WORDS = 2 is a line with its two halves. A
// rank sends for epoch s while it takes for epoch r if r <= s <= r + AHEAD. A message has WORDS words if the bit of
// the epoch is set in LENGTHS, otherwise one word. If its bit is set in TWO_SHOT, an epoch is a two-shot sum
// (csrc/cuda/peers/channel.h): every word has an owner, another one in the next epoch; the other ranks send the word
// to the owner only, which sends it to them after it has taken it from all. LENGTHS = -1 and TWO_SHOT = -1 try every set
// of bits. Prints "ok", "stuck" (a rank waits for a word that cannot arrive) or "stale" (an old word was taken for a new
// one), and the number of states explored.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_set>
#include <vector>

#include "common/ll.h"

namespace ll = swiftspec::ll;

namespace {

constexpr int kRanks = 3, kWords = 2, kSlots = 4;

struct Model {
  int ranks, epochs, words, ahead;
  ll::ProtocolParams params;
  unsigned lengths, sums;  // of epochs, bits: those with long messages, those with two-shot sums

  bool two_shot(int epoch) const { return (sums >> epoch & 1) != 0 && !ll::is_cleaning_epoch(epoch, params); }
  int length(int epoch) const { return lengths >> epoch & 1 ? words : 1; }

  // The first words of a message, as bits; if the sum is two-shot, those of this owner.
  int bits(int epoch, int count, int owner) const {
    int found = 0;
    for (int word = 0; word < count; ++word) {
      if (!two_shot(epoch) || (word + epoch) % ranks == owner) found |= 1 << word;
    }
    return found;
  }
  // Bits of the words that a rank sends to a peer at the beginning of an epoch.
  int sent(int epoch, int to) const {
    return bits(epoch, ll::is_cleaning_epoch(epoch, params) ? words : length(epoch), to);
  }
  // Bits of the words that a rank sends to every peer once it has taken them from all.
  int forwarded(int epoch, int me) const { return two_shot(epoch) ? bits(epoch, length(epoch), me) : 0; }
  // Bits of the words that a rank takes from a peer.
  int taken(int epoch, int me, int from) const {
    return bits(epoch, length(epoch), me) | bits(epoch, length(epoch), from);
  }
};

using Bits = std::array<uint8_t, kRanks>;  // of words, by peer

struct Rank {
  uint8_t sends = 0, takes = 0;  // epochs
  Bits sent{}, taken{}, forwarded{};
};

struct State {
  std::array<Rank, kRanks> rank{};
  // The epoch of the word in each cell, counted from 1; 0 is fresh memory: [reader][writer][slot][word]
  uint8_t memory[kRanks][kRanks][kSlots][kWords] = {};

  std::string key() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
};

bool may_send(const Model& model, const Rank& rank) {
  return rank.sends < model.epochs && rank.sends <= rank.takes + model.ahead;
}

bool may_take(const Model& model, const Rank& rank) {
  return rank.takes < model.epochs && rank.takes <= rank.sends;
}

bool has_sent(const Model& model, const Rank& rank, int me) {
  for (int peer = 0; peer < model.ranks; ++peer) {
    if (peer != me && rank.sent[peer] != model.sent(rank.sends, peer)) return false;
  }
  return true;
}

bool has_taken(const Model& model, const Rank& rank, int me) {
  for (int peer = 0; peer < model.ranks; ++peer) {
    if (peer == me) continue;
    if (rank.taken[peer] != model.taken(rank.takes, me, peer)) return false;
    if (rank.forwarded[peer] != model.forwarded(rank.takes, me)) return false;
  }
  return true;
}

// Goes on to the next epochs once everything has been sent or taken; an owner may have nothing to send.
State settled(const Model& model, State state, int me) {
  Rank& rank = state.rank[me];
  for (;;) {
    if (may_send(model, rank) && has_sent(model, rank, me)) {
      rank.sent = {};
      ++rank.sends;
    } else if (may_take(model, rank) && has_taken(model, rank, me)) {
      rank.taken = rank.forwarded = {};
      ++rank.takes;
    } else {
      return state;
    }
  }
}

uint64_t word_at(const Model& model, uint8_t cell) {
  return cell == 0 ? 0 : ll::pack(cell - 1u, ll::flag_of(cell - 1u, model.params));
}

State after_send(const Model& model, State state, int me, int peer, int word) {
  Rank& rank = state.rank[me];
  state.memory[peer][me][ll::slot_of(rank.sends, model.params)][word] = static_cast<uint8_t>(rank.sends + 1);
  rank.sent[peer] |= 1 << word;
  return settled(model, state, me);
}

State after_forward(const Model& model, State state, int me, int peer, int word) {
  Rank& rank = state.rank[me];
  state.memory[peer][me][ll::slot_of(rank.takes, model.params)][word] = static_cast<uint8_t>(rank.takes + 1);
  rank.forwarded[peer] |= 1 << word;
  return settled(model, state, me);
}

bool taken_from_all(const Model& model, const Rank& rank, int me, int word) {
  for (int peer = 0; peer < model.ranks; ++peer) {
    if (peer != me && !(rank.taken[peer] >> word & 1)) return false;
  }
  return true;
}

State after_take(const Model& model, State state, int me, int peer, int word) {
  Rank& rank = state.rank[me];
  rank.taken[peer] |= 1 << word;
  return settled(model, state, me);
}

// The states one step away in which `me` has sent to a peer.
void sends(const Model& model, const State& state, int me, int peer, std::vector<State>& out) {
  const Rank& rank = state.rank[me];
  const int open = may_send(model, rank) ? model.sent(rank.sends, peer) & ~rank.sent[peer] : 0;
  const int sums = may_take(model, rank) ? model.forwarded(rank.takes, me) & ~rank.forwarded[peer] : 0;
  for (int word = 0; word < model.words; ++word) {
    if (open >> word & 1) out.push_back(after_send(model, state, me, peer, word));
    if (!(sums >> word & 1) || !taken_from_all(model, rank, me, word)) continue;
    out.push_back(after_forward(model, state, me, peer, word));
  }
}

// The states one step away in which `me` has taken a word from a peer. False: a stale word could be taken.
bool takes(const Model& model, const State& state, int me, int peer, std::vector<State>& out) {
  const Rank& rank = state.rank[me];
  const int open = may_take(model, rank) ? model.taken(rank.takes, me, peer) & ~rank.taken[peer] : 0;
  for (int word = 0; word < model.words; ++word) {
    if (!(open >> word & 1)) continue;
    const uint64_t found = word_at(model, state.memory[me][peer][ll::slot_of(rank.takes, model.params)][word]);
    if (!ll::ready(found, ll::flag_of(rank.takes, model.params))) continue;
    if (ll::data_of(found) != rank.takes) return false;
    out.push_back(after_take(model, state, me, peer, word));
  }
  return true;
}

// All states one step away. False: a stale word could be taken.
bool steps(const Model& model, const State& state, std::vector<State>& out) {
  for (int me = 0; me < model.ranks; ++me) {
    for (int peer = 0; peer < model.ranks; ++peer) {
      if (peer == me) continue;
      sends(model, state, me, peer, out);
      if (!takes(model, state, me, peer, out)) return false;
    }
  }
  return true;
}

const char* walk(const Model& model, size_t& states) {
  State first{};
  for (int r = 0; r < model.ranks; ++r) first = settled(model, first, r);
  std::unordered_set<std::string> seen{first.key()};
  std::vector<State> open{first}, next;
  while (!open.empty()) {
    const State state = open.back();
    open.pop_back();
    ++states;
    next.clear();
    if (!steps(model, state, next)) return "stale";
    bool finished = true;
    for (int r = 0; r < model.ranks; ++r) finished = finished && state.rank[r].takes == model.epochs;
    if (next.empty() && !finished) return "stuck";
    for (const State& s : next) {
      if (seen.insert(s.key()).second) open.push_back(s);
    }
  }
  return "ok";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 10) return 2;
  std::array<int, 9> a{};
  for (int i = 0; i < 9; ++i) a[i] = std::atoi(argv[i + 1]);
  Model model{a[0], a[1], a[2], a[4],
              {static_cast<uint32_t>(a[3]), static_cast<uint64_t>(a[5]), static_cast<uint64_t>(a[6])},
              static_cast<unsigned>(a[7]), static_cast<unsigned>(a[8])};
  if (model.ranks > kRanks || model.words > kWords || model.params.num_slots > kSlots) return 2;
  const unsigned every = (1u << model.epochs) - 1;
  const unsigned first = a[7] < 0 ? 0 : model.lengths, last = a[7] < 0 ? every : first;
  const unsigned first_sums = a[8] < 0 ? 0 : model.sums, last_sums = a[8] < 0 ? every : first_sums;
  size_t states = 0;
  std::string outcome = "ok";
  for (model.lengths = first; model.lengths <= last; ++model.lengths) {
    for (model.sums = first_sums; outcome == "ok" && model.sums <= last_sums; ++model.sums) {
      outcome = walk(model, states);
    }
  }
  std::printf("%s %zu\n", outcome.c_str(), states);
}
