// A GPU emulated on a CPU, so that the kernels of csrc/cuda run in tests as they are: their threads are fibers of one
// operating system thread, which take turns in an order drawn from a seed, and whatever the hardware does at its own
// time (copies into shared memory, the halves of a line) happens at a time drawn from that seed.
//
// What CUDA leaves undefined and this notices is an error: lanes of a warp that meet at different instructions, threads
// that wait for each other for ever, shared memory of a block that has left, a misaligned or outlying copy. Shared memory
// is full of NaN at first. Built with AddressSanitizer, every block's shared memory ends where its launch said.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <vector>

namespace simt {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Thread;

// Threads that wait for each other.
struct Gate {
  std::vector<Thread*> waiting;
};

// Lanes that have come to an instruction of the whole warp. The last one computes it for all.
struct Warp {
  Gate gate;
  uint32_t mask = 0;
  const char* what = nullptr;
  const void* in[32] = {};
  void* out[32] = {};
};

struct Copy {
  void* to;
  const void* from;
  uint32_t bytes;
};

struct Cluster;

struct Block {
  Index index;
  unsigned rank = 0;  // in its cluster
  Cluster* cluster = nullptr;
  int live = 0;  // threads that have not ended
  Gate gate;
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<Thread>> threads;
  std::unique_ptr<uint8_t, void (*)(void*)> dynamic{nullptr, &std::free};  // shared memory that the launch asked for
  size_t shared_bytes = 0;
  std::unordered_map<std::type_index, std::pair<std::unique_ptr<uint64_t[]>, size_t>> variables;

  uint8_t* variable(std::type_index type, size_t bytes);
  // The same place in another block's shared memory.
  void* in(Block& other, const void* p, size_t bytes);
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  Gate gate;
  int live = 0;
};

struct Thread {
  ucontext_t beginning;
  jmp_buf here;  // where it has stopped
  bool started = false;
  std::unique_ptr<uint8_t[]> stack;
  void* fake_stack = nullptr;  // AddressSanitizer's
  Index index;
  Block* block = nullptr;
  int warp = 0, lane = 0;
  bool ended = false;
  const char* waits_at = nullptr;
  std::deque<std::vector<Copy>> groups;  // of cp.async; the last one is open
};

// A bulk copy under way, and the mbarrier that hears of it.
struct BulkCopy {
  Copy copy;
  uint64_t* barrier;
};

// The word of an mbarrier.
struct Barrier {
  uint32_t phase : 1, expected : 15, pending : 16;
  int32_t bytes;
};
static_assert(sizeof(Barrier) == 8);

struct Launch {
  Index grid, threads;
  unsigned cluster = 1;
  size_t shared = 0;
  bool together = false;
  std::function<void()> body;
};

class Machine {
 public:
  static Machine& get();

  void seed(uint64_t seed) { dice_.seed(seed); }
  unsigned blocks = 64;  // that run at a time
  bool broken = false;  // a kernel has ended itself; nothing more runs

  void run(const Launch& launch);

  // For threads.
  Thread& self() { return *current_; }
  void yield();
  bool chance(unsigned of) { return dice_() % of == 0; }
  void meet(Gate& gate, int expected, const char* what);
  void collective(uint32_t mask, const char* what, const void* in, void* out, void (*compute)(Warp&));
  void start_copy(const BulkCopy& copy);
  void finish_a_copy();
  void check_shared(const void* p, size_t bytes, size_t alignment, const char* what);
  [[noreturn]] void trap();
  [[noreturn]] void fault(const std::string& what);

  Index grid, block_size;  // of the launch that runs

 private:
  Machine();
  void start(const Launch& launch, Index first);
  void leave(Thread& thread);
  void resume(Thread& thread);
  void stop();  // back to `run`, never to return
  void step();
  void retire();
  bool receives(const Cluster& cluster) const;
  void clear();
  void block(const char* what);
  void wake(Gate& gate);
  void complete(const BulkCopy& done);
  std::string stuck() const;
  static void enter();

  std::mt19937_64 dice_;
  jmp_buf home_;
  void* home_fake_ = nullptr;
  const void* home_stack_ = nullptr;
  size_t home_size_ = 0;
  Thread* current_ = nullptr;
  const Launch* launch_ = nullptr;
  std::vector<Thread*> ready_;
  std::vector<std::unique_ptr<Cluster>> resident_;
  std::vector<BulkCopy> copies_;
  std::vector<std::unique_ptr<uint8_t[]>> stacks_;  // to be used again
  std::string fault_;
  bool trapped_ = false;
  bool cluster_left_ = false;
  unsigned patience_ = 1;  // of this launch: how often a thread that yields is soon its turn again
};

}  // namespace simt
