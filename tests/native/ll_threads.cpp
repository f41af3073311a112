// Ranks as threads, for the sanitizers. Exits with 0 and prints "ok", or prints the error.
//
//   ll_threads sum RANKS BLOCKS EPOCHS FIRST_EPOCH    sessions of csrc/common/ll.h: bitwise sums, with random delays
//   ll_threads ring LINES MESSAGES FIRST_LINE         a ring of csrc/host/shm/ring.h
//   ll_threads shm RANKS                              groups and mailboxes over shared memory
#include <sched.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/ll.h"
#include "host/shm/ll_shm.h"
#include "host/shm/mailbox.h"
#include "host/shm/ring.h"

namespace ll = swiftspec::ll;
namespace host = swiftspec::host;

namespace {

void check(bool ok, const char* what) {
  if (ok) return;
  std::printf("%s\n", what);
  std::exit(1);
}

struct Wait {  // bounded by polls: 32 threads share two cores
  int64_t polls = 0;
  void begin() { polls = 0; }
  bool keep_waiting(int) {
    sched_yield();
    return ++polls < 2'000'000;
  }
};

using Random = std::minstd_rand;

void dawdle(Random& random) {
  switch (random() % 16) {
    case 0: std::this_thread::sleep_for(std::chrono::microseconds(random() % 300)); break;
    case 1: sched_yield(); break;
    default: break;
  }
}

float value(int rank, uint64_t epoch, int block, int64_t i) {  // sums of these depend on their order
  Random random(static_cast<unsigned>(1 + rank + 31 * epoch + 1009 * block + 100003 * i));
  random.discard(2);
  return (static_cast<float>(random() % 2001) - 1000.0f) * std::ldexp(1.0f, static_cast<int>(random() % 40) - 20);
}

uint64_t payload(int rank, uint64_t epoch, int block, int64_t line) {
  const float two[] = {value(rank, epoch, block, 2 * line), value(rank, epoch, block, 2 * line + 1)};
  uint64_t word;
  std::memcpy(&word, two, sizeof word);
  return word;
}

uint64_t expected(int ranks, uint64_t epoch, int block, int64_t line) {
  float two[2];
  for (int i = 0; i < 2; ++i) {
    two[i] = value(0, epoch, block, 2 * line + i);
    for (int r = 1; r < ranks; ++r) two[i] += value(r, epoch, block, 2 * line + i);
  }
  uint64_t word;
  std::memcpy(&word, two, sizeof word);
  return word;
}

void run_block(ll::Session<host::Memory> session, int epochs) {
  Random random(static_cast<unsigned>(session.rank * 100 + session.block + 1));
  Wait wait;
  for (int e = 0; e < epochs; ++e) {
    // All ranks must agree on the length: it follows from epoch and block.
    const int64_t lines = 1 + static_cast<int64_t>((session.epoch * 7 + session.block) % session.layout.lines);
    for (int64_t i = 0; i < lines; ++i) {
      session.broadcast(i, payload(session.rank, session.epoch, session.block, i));
      dawdle(random);
    }
    for (int64_t i = 0; i < lines; ++i) {
      const uint64_t own = payload(session.rank, session.epoch, session.block, i);
      uint64_t total = 0;
      check(session.reduce<ll::Float32>(i, own, total, wait), "a line did not come");
      check(total == expected(session.layout.ranks, session.epoch, session.block, i), "a sum is wrong");
    }
    dawdle(random);
    session.finish(lines);
  }
}

void sum(int ranks, int blocks, int epochs, uint64_t first) {
  const ll::Layout layout{ranks, blocks, 12};
  std::vector<std::vector<ll::Line>> inboxes(ranks, std::vector<ll::Line>(layout.inbox_lines()));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    for (int b = 0; b < blocks; ++b) {
      ll::Session<host::Memory> session{layout, r, b, first, {}};
      for (int peer = 0; peer < ranks; ++peer) session.inbox[peer] = inboxes[peer].data();
      threads.emplace_back(run_block, session, epochs);
    }
  }
  for (std::thread& thread : threads) thread.join();
  // Every line was written in or after the last cleaning epochs, if there were any.
  uint64_t cleaned = first + epochs;
  while (cleaned > first && !ll::is_cleaning_epoch(--cleaned)) continue;
  if (!ll::is_cleaning_epoch(cleaned)) return;
  for (int r = 0; r < ranks; ++r) {
    for (int source = 0; source < ranks; ++source) {
      for (int64_t i = 0; source != r && i < 2 * blocks * layout.lines; ++i) {
        const ll::Line& line = inboxes[r][layout.index(source, 0, 0, 0) + i];
        bool recent = false;
        for (uint64_t e = cleaned - 1; e < first + epochs; ++e) recent |= ll::ready(line.half[1], ll::flag_of(e));
        check(recent, "a line kept an old flag");
      }
    }
  }
}

void ring(int64_t lines, int messages, uint64_t first) {
  std::vector<ll::Line> memory(lines);
  uint64_t taken = first;
  const auto length = [&](int m) { return (m * 37) % (5 * lines); };
  std::thread writer([&] {
    host::Ring out(memory.data(), lines, &taken, first);
    Random random(1);
    Wait wait;
    for (int m = 0; m < messages; ++m) {
      std::vector<int32_t> words(length(m));
      for (size_t i = 0; i < words.size(); ++i) words[i] = m * 1000 - static_cast<int32_t>(i);
      bool torn = true;
      check(out.put(words.data(), length(m), 1, torn, wait) && !torn, "no room in the ring");
      dawdle(random);
    }
  });
  host::Ring in(memory.data(), lines, &taken, first);
  Random random(2);
  Wait wait;
  for (int m = 0; m < messages; ++m) {
    int32_t n = -1;
    check(in.length(n, 0, wait) && in.length(n, 0, wait) && n == length(m), "a wrong length");
    std::vector<int32_t> words(n);
    check(in.take(words.data(), n, 0, wait), "a message stops short");
    for (int32_t i = 0; i < n; ++i) check(words[i] == m * 1000 - i, "a wrong word");
    dawdle(random);
  }
  writer.join();
}

void shm_rank(const std::string& name, int rank, int ranks) {
  const host::WaitPolicy policy{true, nullptr};
  host::ShmGroup group(name + "g", rank, ranks, 64, 60, policy);
  for (int n : {0, 1, 7, 16, 17, 100}) {
    std::vector<float> x(n);
    for (int i = 0; i < n; ++i) x[i] = value(rank, 0, 0, i);
    group.all_reduce(x.data(), n, host::Element::kFloat32, 60);
    for (int i = 0; i < n; ++i) {
      float sum = value(0, 0, 0, i);
      for (int r = 1; r < ranks; ++r) sum += value(r, 0, 0, i);
      check(x[i] == sum, "a sum over shared memory is wrong");
    }
    std::vector<uint8_t> mine(n, static_cast<uint8_t>(rank)), all(n * ranks);
    group.all_gather(mine.data(), n, all.data(), 60);
    for (int i = 0; i < n * ranks; ++i) check(all[i] == i / n, "a gather is wrong");
  }
  if (ranks == 1 || rank > 1) return;  // a mailbox has two sides
  host::Mailbox mailbox(name + "m", rank, 10, 60, policy);
  std::vector<int32_t> words(33, rank);
  if (rank == 0) mailbox.send(words.data(), 33, 60);
  check(mailbox.wait(60) == 33, "a wrong length");
  mailbox.take(words.data(), 33, 60);
  check(words[0] == 1 - rank && words[32] == 1 - rank, "a wrong word");
  if (rank == 1) mailbox.send(std::vector<int32_t>(33, 1).data(), 33, 60);
}

void shm(int ranks) {
  const std::string name = "/swiftspec-test-" + std::to_string(std::random_device()());
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back(shm_rank, name, r, ranks);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "sum" && argc == 6) {
    sum(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), std::strtoull(argv[5], nullptr, 10));
  } else if (what == "ring" && argc == 5) {
    ring(std::atoi(argv[2]), std::atoi(argv[3]), std::strtoull(argv[4], nullptr, 10));
  } else if (what == "shm" && argc == 3) {
    shm(std::atoi(argv[2]));
  } else {
    return 2;
  }
  std::printf("ok\n");
}
