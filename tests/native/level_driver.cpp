// Selection of ISA levels and preparation of threads (host/isa/level.cpp, host/ops/threads.cpp), with levels that count
// instead of those of cpu_levels.cpp. Exits with 0, or prints what is wrong.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "host/isa/level.h"
#include "host/ops/threads.h"

using namespace swiftspec::host;

namespace {

std::atomic<int> inits[2];            // calls of each level's init_thread
thread_local int prepared_for = -1;   // the level whose init_thread ran last on this thread
std::atomic<int64_t> tasks_waiting{0};

void require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);  // without destructors, which would wait for this thread
}

template <int Index>
void init_thread() {
  prepared_for = Index;
  ++inits[Index];
}

template <int Index>
void run_task() {
  require(prepared_for == Index, "a kernel runs on a thread that is not prepared for its level");
}

// As many tasks as threads, each of which waits for all others: every thread runs one.
template <int Index>
void kernel_of_all_threads(const LinearArgs&) {
  const int64_t count = threads();
  tasks_waiting = 0;
  parallel_for(count, [&](int64_t) {
    run_task<Index>();
    ++tasks_waiting;
    while (tasks_waiting < count) std::this_thread::yield();
  });
}

template <int Index>
void kernel_of_any_threads(const LinearArgs&) {
  run_task<Index>();
  parallel_for(8, [](int64_t) { run_task<Index>(); });
}

template <int Index>
Kernels counting_kernels() {
  Kernels kernels{};
  kernels.linear_f32 = kernel_of_all_threads<Index>;
  kernels.linear_bf16 = kernel_of_any_threads<Index>;
  kernels.init_thread = init_thread<Index>;
  return kernels;
}

void plain_kernel(const LinearArgs&) {
  parallel_for(8, [](int64_t) {});
}

Kernels plain_kernels() {
  Kernels kernels{};
  kernels.linear_f32 = kernels.linear_bf16 = plain_kernel;
  return kernels;
}

bool yes() { return true; }

const Level kLevels[] = {{"unsupported", [] { return false; }, [] { return Kernels{}; }},
                         {"first", yes, counting_kernels<0>},
                         {"second", yes, counting_kernels<1>},
                         {"plain", yes, plain_kernels}};

void run_on_all_threads() { linear({}, true); }

void check_counts() {
  const auto counts = [](int first, int second) { return inits[0] == first && inits[1] == second; };
  require(std::string(level()) == "first", "the first supported level is not selected");
  require(!use_level("unsupported") && !use_level("unknown"), "a level that the CPU lacks is selected");
  set_threads(3);
  for (int i = 0; i < 5; ++i) run_on_all_threads();
  require(counts(3, 0), "not once on the caller and on each worker");
  require(use_level("second"), "a supported level is not selected");
  require(counts(3, 0), "before the first kernel");
  for (int i = 0; i < 5; ++i) run_on_all_threads();
  require(counts(3, 3), "not once per thread after another level is selected");
  use_level("plain");
  run_on_all_threads();
  use_level("second");
  run_on_all_threads();
  require(counts(3, 3), "a level without init_thread undoes nothing");
  use_level("first");
  run_on_all_threads();
  require(counts(6, 3), "not again after the init_thread of another level");
  std::thread(run_on_all_threads).join();
  require(counts(7, 3), "not once on another calling thread");
  set_threads(5);
  run_on_all_threads();
  require(counts(11, 3), "not once on each worker of a new pool");
}

// Two callers run kernels, whose tasks check their thread, while the level changes.
void check_changes() {
  std::atomic<int> running{2};
  const auto call = [&] {
    for (int i = 0; i < 300; ++i) linear({}, false);
    --running;
  };
  std::thread one(call), other(call);
  for (int i = 0; running > 0; ++i) use_level(kLevels[1 + i % 3].name);
  one.join();
  other.join();
}

}  // namespace

std::span<const Level> swiftspec::host::levels() { return kLevels; }

int main() {
  check_counts();
  check_changes();
  return 0;
}
