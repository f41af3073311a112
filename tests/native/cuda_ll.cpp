// Launches that sum over ranks, and between them some that gather (csrc/cuda/peers/channel.h), as threads, for the
// sanitizers: prints "ok" or the error.
//
//   cuda_ll RANKS EPOCHS FIRST_EPOCH AHEAD TWO_SHOT
//
// Each rank is a stream of launches of two CTAs, threads here, with a barrier at the end of a launch as between kernels
// of a stream. With AHEAD a CTA sends for the next epoch before it receives for this one, which the third and fourth
// slot allow. Every third launch gathers, except with AHEAD. With TWO_SHOT the sums are two-shot.
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "cuda/peers/channel.h"
#include "host/shm/atomic.h"

using namespace swiftspec;

namespace {

constexpr int kCtas = 2, kLines = 12;

void check(bool ok, const char* what) {
  if (ok) return;
  std::printf("%s\n", what);
  std::exit(1);
}

struct Wait {
  int64_t polls = 0;
  bool keep_waiting(int) {
    std::this_thread::yield();
    return ++polls < 20'000'000;
  }
};

uint16_t value(int rank, uint64_t epoch, int64_t line, int i) {
  std::minstd_rand dice(static_cast<unsigned>(1 + rank + 31 * epoch + 1009 * line + 100003 * i));
  dice.discard(2);
  return ll::Bfloat16::round(static_cast<float>(dice() % 2001) - 1000.0f);
}

uint64_t payload(int rank, uint64_t epoch, int64_t line) {
  uint64_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint64_t>(value(rank, epoch, line, i)) << 16 * i;
  return word;
}

uint64_t expected(int ranks, uint64_t epoch, int64_t line) {
  uint64_t word = 0;
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int r = 0; r < ranks; ++r) sum += ll::Bfloat16::widen(value(r, epoch, line, i));
    word |= static_cast<uint64_t>(ll::Bfloat16::round(sum)) << 16 * i;
  }
  return word;
}

// Word `i` that a rank contributes to a gather; an odd number of words leaves half a line.
uint32_t word(int rank, uint64_t epoch, int64_t i) { return static_cast<uint32_t>(payload(rank, epoch, i) >> 7); }

// The strip of a line, which another number of outputs changes.
int strip_of(uint64_t epoch, int64_t line) { return static_cast<int>(line + epoch % 5); }

int64_t length(uint64_t epoch) { return 1 + static_cast<int64_t>(epoch * 7 % kLines); }

struct Rank {
  cuda::Channel channel;
  std::vector<uint32_t> mine, out;
  std::barrier<> launch{kCtas};

  void send(uint64_t epoch, int cta, std::minstd_rand& dice) const {
    const cuda::Session<host::Memory> session{channel, epoch};
    for (int64_t line = cta; line < length(epoch); line += kCtas) {
      session.send(session.owners(strip_of(epoch, line)), line, payload(channel.rank, epoch, line));
      if (dice() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice() % 200));
    }
  }

  void gather(const cuda::Session<host::Memory>& session, int cta, Wait& wait) {
    const int64_t count = 1 + static_cast<int64_t>(session.epoch * 5 % (2 * kLines));
    const int ranks = channel.layout.ranks;
    if (cta == 0) {
      mine.resize(count);
      for (int64_t i = 0; i < count; ++i) mine[i] = word(channel.rank, session.epoch, i);
      out.assign(ranks * count, 0);
    }
    launch.arrive_and_wait();
    const cuda::Gather task{mine.data(), out.data(), count, count};
    task.send(session, cta, kCtas);
    check(task.receive(session, cta, kCtas, wait), "a line did not come");
    session.clean(cuda::word_lines(count), cta, kCtas);
    launch.arrive_and_wait();
    for (int64_t i = 0; i < ranks * count; ++i) {
      check(out[i] == word(static_cast<int>(i / count), session.epoch, i % count), "a gathered word is wrong");
    }
  }

  void sum(const cuda::Session<host::Memory>& session, int cta, bool owned, Wait& wait) const {
    const uint64_t epoch = session.epoch;
    for (int64_t line = cta; line < length(epoch); line += kCtas) {
      if (session.owns(strip_of(epoch, line)) != owned) continue;
      uint64_t total = 0;
      check(session.reduce(strip_of(epoch, line), line, total, wait), "a line did not come");
      check(total == expected(channel.layout.ranks, epoch, line), "a sum is wrong");
    }
  }

  void run(int cta, uint64_t first, uint64_t last, bool ahead) {
    std::minstd_rand dice(static_cast<unsigned>(channel.rank * 10 + cta + 1));
    Wait wait;
    if (ahead) send(first, cta, dice);
    for (uint64_t epoch = first; epoch < last; ++epoch) {
      const cuda::Session<host::Memory> session{channel, epoch};
      if (!ahead && epoch % 3 == 0) {
        gather(session, cta, wait);
        launch.arrive_and_wait();
        continue;
      }
      if (!ahead || epoch + 1 < last) send(epoch + (ahead ? 1 : 0), cta, dice);
      for (const bool owned : {true, false}) sum(session, cta, owned, wait);
      session.clean(length(epoch), cta, kCtas);
      launch.arrive_and_wait();
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  check(argc == 6, "five numbers");
  const int ranks = std::atoi(argv[1]), epochs = std::atoi(argv[2]);
  const uint64_t first = std::strtoull(argv[3], nullptr, 10);
  const ll::Layout layout{ranks, 1, kLines};
  std::vector<std::vector<ll::Line>> inboxes(ranks, std::vector<ll::Line>(layout.inbox_lines(cuda::protocol_params())));
  std::vector<Rank> all(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    all[r].channel = {layout, r, {}, nullptr, nullptr, nullptr, argv[5][0] == '1'};
    for (int peer = 0; peer < ranks; ++peer) all[r].channel.inbox[peer] = inboxes[peer].data();
    for (int c = 0; c < kCtas; ++c)
      threads.emplace_back(&Rank::run, &all[r], c, first, first + epochs, argv[4][0] == '1');
  }
  for (std::thread& thread : threads) thread.join();
  std::puts("ok");
}
