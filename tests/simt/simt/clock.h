// Virtual time of the emulated GPU, in cycles of a multiprocessor (SM). With a clock, the machine runs the warp that is
// the earliest instead of a random one, copies arrive at their times, and blocks are placed on SMs by their shared memory
// and warps. The lanes of a warp share its time.
//
// What takes time: barriers, copies (latency, memory and the port of the SM), starts and ends of blocks, and the
// instructions of a warp, which occupy one of four schedulers. The emulation does not see ordinary instructions: a cost
// per product and per 16 bytes of shared or device memory stands for them. A warp waits for its loads when it next stores,
// multiplies or exchanges registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "simt/machine.h"

namespace simt {

constexpr int kTileProducts = 16, kTileAccesses = 10;  // of an int4 tile and 8 rows

struct Costs {
  // Fitted to measurements of an H100 (tests/simt/clock.py).
  double launch = 3620;   // time of a launch that nothing else here explains, before griddepcontrol.wait returns
  double cluster = 1070;  // barrier of a cluster, after the last arrival
  double access = 23;     // instructions per 16 bytes that a lane loads or stores
  // Measured on an H100 (profiles/h100-constants.json), published, or counted in the compiled kernels.
  // From one product of a warp to its next, if no other warp uses the scheduler: 480 ns for a tile (tiling.h, launch_ns).
  double product = 45;
  double tile = 291;      // cycles of the integer pipe of a scheduler for a tile of 8 rows, its accesses included
  double shared = 30, l2 = 260, peer = 200;  // latency of a load; `peer`: from another block of the cluster
  double shuffle = 25, block = 20;           // `block`: barrier of a block, after the last arrival
  double copy = 800;      // latency of a bulk copy
  double port = 32;       // bytes per cycle into an SM
  double memory = 1720;   // bytes per cycle of the whole GPU
  double start = 500;     // from a free place on the SMs to the first instruction of a block; a guess
  double drain = 600;     // from the last instruction of a block to its end; a guess
  double release = 1086;  // from the end of a launch to the return of griddepcontrol.wait in the next one
  double plain = 1583;    // from the end of a launch to the start of one that is not early

  // Of the scheduler, per product.
  double issue() const { return std::max(tile - kTileAccesses * access, 0.0) / kTileProducts; }
  // The cost of this name; null if there is none.
  double* named(std::string_view name);
};

// A multiprocessor.
struct Sm {
  double schedulers[4] = {};  // when they are free
  double port = 0;            // when what was requested has arrived
  unsigned warps = 0;
  size_t shared = 0;
  std::unordered_set<uintptr_t> l1;  // lines that plain loads have fetched; a cluster barrier and a new block empty it
};

// A copy that arrives, or without bytes an arrival at a barrier of another block.
struct Event {
  double at;
  uint64_t order;
  BulkCopy copy;
};

class Clock {
 public:
  static constexpr double kGhz = 1.755;

  explicit Clock(unsigned sms) : sms_(sms) {}
  Costs costs;
  double now = 0;            // of what runs
  std::vector<double> ends;  // of the launches, in order

  bool has_room(const Launch& launch) { return candidates(launch).size() >= launch.cluster; }  // for a cluster
  std::vector<Sm*> place(const Launch& launch);  // the blocks of a cluster
  void start(Block& block, bool early);
  void remove(const Block& block);
  void release(Thread& thread);  // griddepcontrol.wait returns

  void ready(Thread& thread);
  Thread* next();  // of the earliest warp; null: none is ready
  void schedule(double at, const BulkCopy& copy) { events_.push({at, ++order_, copy}); }
  bool event_is_next() const;
  Event next_event();
  std::unordered_map<uint64_t*, Gate> waiting;  // at mbarriers
  void clear();

  // Costs of the thread that runs. Lane 0 stands for the instructions of its warp.
  void issue(Warp& warp, double instructions, double latency = 0);
  void pass(Thread& last, const Gate& gate);         // a barrier of a block or cluster
  void pass(Warp& warp, std::string_view what);      // an instruction of the whole warp
  void product(Warp& warp);
  void load(Thread& thread, size_t bytes, double latency);
  void load_device(Thread& thread, const void* from, size_t bytes);
  void load_async(Thread& thread, size_t bytes);
  void store(Thread& thread, size_t bytes);
  void use_loads(Warp& warp) { warp.now = std::max(warp.now, warp.loaded); }
  double arrival(Thread& thread, double bytes, bool cached);  // of a bulk copy that starts now

 private:
  struct Turn {
    double at;
    uint64_t order;
    Warp* warp;
  };
  template <class T>
  struct Later {
    bool operator()(const T& a, const T& b) const { return a.at > b.at || (a.at == b.at && a.order > b.order); }
  };
  template <class T>
  using Queue = std::priority_queue<T, std::vector<T>, Later<T>>;

  std::vector<Sm*> candidates(const Launch& launch);

  std::vector<Sm> sms_;
  Queue<Turn> turns_;
  Queue<Event> events_;
  std::vector<Thread*> running_;  // lanes of the warp that runs
  double memory_ = 0;             // when the memory has delivered what was requested
  uint64_t order_ = 0;
};

}  // namespace simt
