// A GPU emulated on a CPU, so that the kernels of csrc/cuda run in tests unchanged: their threads are fibers of one
// operating system thread, scheduled in a random order that depends on a seed, and asynchronous operations of the
// hardware (copies into shared memory, the halves of a line) happen at random times that depend on that seed.
//
// Launches are queued until a caller waits for them, so that early launches can overlap: a few are in flight at a time.
//
// These kinds of undefined behaviour are errors: lanes of a warp that meet at different instructions, threads that wait
// for each other for ever, shared memory of a block that has ended, a misaligned or outlying copy, a thread of an early
// launch that ends without having waited for the previous launch. Shared memory is initialised with NaN. With
// AddressSanitizer, every block's shared memory has exactly the size of its launch.
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

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#else
#define SIMT_ASAN 0
#endif

namespace simt {

constexpr size_t kStack = SIMT_ASAN ? 256 << 10 : 64 << 10;  // bytes of a thread's

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Thread;

// Threads that wait for each other.
struct Gate {
  std::vector<Thread*> waiting;
};

// The rows of a warp in a product of its warpgroup that is in flight, with the registers of the lanes.
struct Product {
  float* d[32];
  const uint32_t* a[32];
  uint64_t b;
  bool accumulate;
};

// Lanes that have reached an instruction of the whole warp. The last one computes it for all.
struct Warp {
  Gate gate;
  uint32_t mask = 0;
  const char* what = nullptr;
  const void* in[32] = {};
  void* out[32] = {};
  std::deque<std::vector<Product>> products{1};  // groups of wgmma; the last one is open
  // with a clock
  double now = 0, loaded = 0;  // its time, and when its loads have arrived
  double* scheduler = nullptr;
  std::vector<Thread*> ready;  // lanes
};

struct Copy {
  void* to;
  const void* from;
  uint32_t bytes;
};

struct Launch {
  Index grid, threads;
  unsigned cluster = 1;
  size_t shared = 0;
  bool together = false;  // cooperative: all blocks run concurrently
  bool early = false;     // may start before the previous launch ends, once its blocks have called launch_dependents
  std::function<void()> body;
};

// A launch in flight.
struct Grid {
  Launch launch;
  std::shared_ptr<Grid> before;  // the previous launch; null if there was none, and after this one has ended
  uint64_t clusters = 0, begun = 0, left = 0;
  uint64_t silent = 0;  // blocks that have neither called launch_dependents nor ended
  Gate dependents;      // threads that wait for its end

  bool ended() const { return left == clusters; }
};

struct Cluster;
struct Sm;
class Clock;

struct Block {
  Index index;
  unsigned rank = 0;  // in its cluster
  Cluster* cluster = nullptr;
  Grid* grid = nullptr;
  Sm* sm = nullptr;  // with a clock
  int live = 0;  // threads that have not ended
  bool silent = true;
  Gate gate;
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<Thread>> threads;
  std::unique_ptr<uint8_t, void (*)(void*)> dynamic{nullptr, &std::free};  // dynamic shared memory
  size_t shared_bytes = 0;
  std::unordered_map<std::type_index, std::pair<std::unique_ptr<uint64_t[]>, size_t>> variables;

  uint8_t* variable(std::type_index type, size_t bytes);
  // The same place in another block's shared memory.
  void* in(Block& other, const void* p, size_t bytes);
};

struct Cluster {
  std::shared_ptr<Grid> grid;
  size_t part = 0;
  std::vector<std::unique_ptr<Block>> blocks;
  Gate gate;
  int live = 0;
};

// The stack and context of a thread. It is reused by another thread, since creating one needs system calls.
struct Fiber {
  std::unique_ptr<uint8_t[]> stack{new uint8_t[kStack]};
  bool started = false;
  jmp_buf here;  // where it has stopped
  void* fake_stack = nullptr;  // AddressSanitizer's
};

struct Thread {
  std::unique_ptr<Fiber> fiber;
  Index index;
  Block* block = nullptr;
  int warp = 0, lane = 0;
  bool ended = false;
  bool in_order = false;  // it has waited for the end of the previous launch
  const char* waits_at = nullptr;
  std::deque<std::vector<Copy>> groups;  // of cp.async; the last one is open

  Warp& its_warp() const { return block->warps[static_cast<size_t>(warp)]; }
};

// A bulk copy in flight, and the mbarrier that it completes on.
struct BulkCopy {
  Copy copy;
  uint64_t* barrier;
};

// The 64 bits of an mbarrier.
struct Barrier {
  uint32_t phase : 1, expected : 15, pending : 16;
  int32_t bytes;
};
static_assert(sizeof(Barrier) == 8);

class Machine {
 public:
  static Machine& get() {
    static Machine machine;
    return machine;
  }

  void seed(uint64_t seed) { dice_.seed(seed); }
  int ordinal = 0;       // of the GPU; differs for other `parts`
  std::vector<unsigned> parts = {16, 16, 16, 16};  // blocks that run at a time; a cluster lies within one of them
  size_t shared = 0;     // bytes of shared memory that a block may have; 0: that of the kernels' GPU
  int driver = 12040;    // CUDA version of the driver; older ones refuse early launches
  bool queues = false;   // launches run when others follow or a caller waits, not immediately
  bool broken = false;   // a kernel has trapped; no further launch runs
  std::shared_ptr<Clock> clock;  // virtual time instead of random schedules (clock.h); null by default
  std::function<void()> pause = [] {};  // called periodically; if it throws, all launches end

  unsigned clusters(unsigned blocks) const;  // clusters of `blocks` blocks that run concurrently
  void run(Launch launch);
  void finish(size_t most = 0);  // runs until at most `most` launches are in flight, or `pause` throws

  // For threads.
  Thread& self() { return *current_; }
  bool runs() const { return current_ != nullptr; }  // a thread
  void yield();
  bool chance(unsigned of) { return dice_() % of == 0; }
  void meet(Gate& gate, int expected, const char* what);
  void collective(uint32_t mask, const char* what, const void* in, void* out, void (*compute)(Warp&));
  void start_copy(const BulkCopy& copy, bool cached = false);
  void finish_a_copy();
  // Adds arrivals and expected bytes to an mbarrier.
  void change_barrier(uint64_t* barrier, uint32_t arrivals, int32_t bytes);
  void await(uint64_t* barrier);  // a change of its phase, or with random schedules anything
  // An arrival at a barrier of another block, or bytes that this thread has stored there.
  void signal(uint64_t* barrier, uint32_t bytes);
  // Without a clock, these do nothing.
  void settle();  // until no other thread is earlier
  void product();
  void load_from_peer(size_t bytes);
  void load_async();  // cp.async of 16 bytes
  void await_async();
  uint64_t virtual_ns() const;
  void launch_dependents();
  void wait_for_dependencies();
  void check_shared(const void* p, size_t bytes, size_t alignment, const char* what);
  [[noreturn]] void trap();
  [[noreturn]] void fault(const std::string& what);

 private:
  Machine() : dice_(1) {}
  void begin();
  bool find_room(const Launch& launch, size_t& part) const;
  void start(const std::shared_ptr<Grid>& grid, size_t part);
  void leave(Thread& thread);
  void resume(Thread& thread);
  void stop();  // back to `resume`
  void step();
  void step_in_time();
  void look_up();
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
  std::vector<std::shared_ptr<Grid>> under_way_;  // in launch order
  std::vector<Thread*> ready_;
  std::vector<std::unique_ptr<Cluster>> resident_;
  std::vector<BulkCopy> copies_;
  std::vector<std::unique_ptr<Fiber>> fibers_;  // for reuse
  std::string fault_;
  bool trapped_ = false;
  uint64_t steps_ = 0;
  bool changed_ = false;  // a cluster has ended, or no block is silent any more
  unsigned patience_ = 1;  // since the last launch: how often a thread that yields is scheduled again soon
};

}  // namespace simt
