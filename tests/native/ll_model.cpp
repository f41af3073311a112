// Model checker: explores every interleaving of a few ranks that exchange words by the rules of csrc/common/ll.h.
//
//   ll_model RANKS EPOCHS WORDS SLOTS AHEAD FLAGS CLEAN_EVERY LENGTHS
//
// In each epoch every rank sends words to every other rank, in any order, and takes theirs, in any order; one send or
// one take is one step. A word is the unit that memory writes atomically, so WORDS = 2 is a line with its two halves. A
// rank sends for epoch s while it takes for epoch r if r <= s <= r + AHEAD. A message has WORDS words if the bit of
// the epoch is set in LENGTHS, otherwise one word; LENGTHS = -1 tries every set of bits. Prints "ok", "stuck" (a rank
// waits for a word that cannot arrive) or "stale" (an old word was taken for a new one), and the number of states
// explored.
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
  unsigned lengths;

  int length(int epoch) const { return lengths >> epoch & 1 ? words : 1; }
  int sent(int epoch) const { return ll::is_cleaning_epoch(epoch, params) ? words : length(epoch); }
};

struct Rank {
  uint8_t sends = 0, takes = 0;  // epochs
  std::array<uint8_t, kRanks> sent{}, taken{};  // bits of words, by peer
};

struct State {
  std::array<Rank, kRanks> rank{};
  // The epoch of the word in each cell, counted from 1; 0 is fresh memory: [reader][writer][slot][word]
  uint8_t memory[kRanks][kRanks][kSlots][kWords] = {};

  std::string key() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
};

bool is_full(const std::array<uint8_t, kRanks>& bits, int me, int ranks, int words) {
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer != me && bits[peer] != (1 << words) - 1) return false;
  }
  return true;
}

uint64_t word_at(const Model& model, uint8_t cell) {
  return cell == 0 ? 0 : ll::pack(cell - 1u, ll::flag_of(cell - 1u, model.params));
}

State after_send(const Model& model, State state, int me, int peer, int word) {
  Rank& rank = state.rank[me];
  state.memory[peer][me][ll::slot_of(rank.sends, model.params)][word] = static_cast<uint8_t>(rank.sends + 1);
  rank.sent[peer] |= 1 << word;
  if (is_full(rank.sent, me, model.ranks, model.sent(rank.sends))) {
    rank.sent = {};
    ++rank.sends;
  }
  return state;
}

State after_take(const Model& model, State state, int me, int peer, int word) {
  Rank& rank = state.rank[me];
  rank.taken[peer] |= 1 << word;
  if (is_full(rank.taken, me, model.ranks, model.length(rank.takes))) {
    rank.taken = {};
    ++rank.takes;
  }
  return state;
}

// The states one step away. False: a stale word could be taken.
bool steps(const Model& model, const State& state, std::vector<State>& out) {
  for (int me = 0; me < model.ranks; ++me) {
    const Rank& rank = state.rank[me];
    const bool may_send = rank.sends < model.epochs && rank.sends <= rank.takes + model.ahead;
    const bool may_take = rank.takes < model.epochs && rank.takes <= rank.sends;
    for (int peer = 0; peer < model.ranks; ++peer) {
      if (peer == me) continue;
      for (int word = 0; may_send && word < model.sent(rank.sends); ++word) {
        if (!(rank.sent[peer] >> word & 1)) out.push_back(after_send(model, state, me, peer, word));
      }
      for (int word = 0; may_take && word < model.length(rank.takes); ++word) {
        if (rank.taken[peer] >> word & 1) continue;
        const uint64_t found = word_at(model, state.memory[me][peer][ll::slot_of(rank.takes, model.params)][word]);
        if (!ll::ready(found, ll::flag_of(rank.takes, model.params))) continue;
        if (ll::data_of(found) != rank.takes) return false;
        out.push_back(after_take(model, state, me, peer, word));
      }
    }
  }
  return true;
}

const char* walk(const Model& model, size_t& states) {
  std::unordered_set<std::string> seen{State{}.key()};
  std::vector<State> open{State{}}, next;
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
  if (argc != 9) return 2;
  std::array<int, 8> a{};
  for (int i = 0; i < 8; ++i) a[i] = std::atoi(argv[i + 1]);
  Model model{a[0], a[1], a[2], a[4],
              {static_cast<uint32_t>(a[3]), static_cast<uint64_t>(a[5]), static_cast<uint64_t>(a[6])},
              static_cast<unsigned>(a[7])};
  if (model.ranks > kRanks || model.words > kWords || model.params.num_slots > kSlots) return 2;
  const unsigned first = a[7] < 0 ? 0 : model.lengths, last = a[7] < 0 ? (1u << model.epochs) - 1 : first;
  size_t states = 0;
  std::string outcome = "ok";
  for (model.lengths = first; outcome == "ok" && model.lengths <= last; ++model.lengths) outcome = walk(model, states);
  std::printf("%s %zu\n", outcome.c_str(), states);
}
