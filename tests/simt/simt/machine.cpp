#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#else
#define SIMT_ASAN 0
#endif

namespace simt {
namespace {

constexpr size_t kStack = SIMT_ASAN ? 256 << 10 : 64 << 10;
constexpr size_t kAlignment = 128;
constexpr size_t kUnderWay = 3;  // launches; two of them are early

}  // namespace

Machine& Machine::get() {
  static Machine machine;
  return machine;
}

Machine::Machine() : dice_(1) {}

uint8_t* Block::variable(std::type_index type, size_t bytes) {
  auto& [memory, size] = variables[type];
  if (memory == nullptr) {
    memory.reset(new uint64_t[(bytes + 15) / 8 + 1]);
    size = bytes;
    std::memset(memory.get(), 0xff, (bytes + 15) / 8 * 8 + 8);
  }
  const auto at = reinterpret_cast<uintptr_t>(memory.get());
  return reinterpret_cast<uint8_t*>((at + 15) / 16 * 16);
}

void* Block::in(Block& other, const void* p, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  const auto inside = [&](const uint8_t* from, size_t size) {
    const auto first = reinterpret_cast<uintptr_t>(from);
    return at >= first && at + bytes <= first + size;
  };
  if (other.live == 0) Machine::get().fault("shared memory of a block that has left is read");
  if (inside(dynamic.get(), shared_bytes)) return other.dynamic.get() + (at - reinterpret_cast<uintptr_t>(dynamic.get()));
  for (auto& [type, memory] : variables) {
    const uint8_t* mine = variable(type, memory.second);
    if (inside(mine, memory.second)) return other.variable(type, memory.second) + (at - reinterpret_cast<uintptr_t>(mine));
  }
  Machine::get().fault("an address of a cluster that is not in shared memory");
}

// ---- Fibers.

void Machine::resume(Thread& thread) {
  current_ = &thread;
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(&home_fake_, thread.stack.get(), kStack);
#endif
  if (_setjmp(home_) == 0) {  // jumps, for a swap of contexts asks the kernel twice
    if (thread.started) _longjmp(thread.here, 1);
    thread.started = true;
    setcontext(&thread.beginning);
  }
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(home_fake_, nullptr, nullptr);
#endif
  current_ = nullptr;
}

void Machine::stop() {
  Thread& thread = *current_;
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(thread.ended ? nullptr : &thread.fake_stack, home_stack_, home_size_);
#endif
  if (_setjmp(thread.here) == 0) _longjmp(home_, 1);
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(thread.fake_stack, &home_stack_, &home_size_);
#endif
}

void Machine::enter() {
  Machine& machine = get();
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &machine.home_stack_, &machine.home_size_);
#endif
  machine.current_->block->grid->launch.body();
  machine.leave(*machine.current_);
  machine.stop();
}

void Machine::leave(Thread& thread) {
  Block& block = *thread.block;
  if (block.grid->launch.early && !thread.in_order) fault("a thread has ended that did not wait for the launch in front");
  thread.ended = true;
  --block.live, --block.cluster->live;
  if (block.live == 0) launch_dependents();
  // those that wait for all that are left need wait no longer
  if (block.live > 0 && static_cast<int>(block.gate.waiting.size()) == block.live) wake(block.gate);
  changed_ |= block.cluster->live == 0;
  if (block.cluster->live > 0 && static_cast<int>(block.cluster->gate.waiting.size()) == block.cluster->live) {
    wake(block.cluster->gate);
  }
}

void Machine::yield() {
  ready_.push_back(current_);
  if (chance(patience_)) std::swap(ready_[dice_() % ready_.size()], ready_.back());  // behind others
  stop();
}

void Machine::block(const char* what) {
  current_->waits_at = what;
  stop();
  current_->waits_at = nullptr;
}

void Machine::wake(Gate& gate) {
  ready_.insert(ready_.end(), gate.waiting.begin(), gate.waiting.end());
  gate.waiting.clear();
}

void Machine::meet(Gate& gate, int expected, const char* what) {
  if (static_cast<int>(gate.waiting.size()) + 1 == expected) {
    wake(gate);
    return;
  }
  gate.waiting.push_back(current_);
  block(what);
}

void Machine::collective(uint32_t mask, const char* what, const void* in, void* out, void (*compute)(Warp&)) {
  Thread& thread = *current_;
  Warp& warp = thread.block->warps[static_cast<size_t>(thread.warp)];
  if ((mask >> thread.lane & 1) == 0) fault(std::string(what) + ": a lane that its mask leaves out");
  if (warp.gate.waiting.empty()) {
    warp.mask = mask, warp.what = what;
  } else if (warp.mask != mask || std::strcmp(warp.what, what) != 0) {
    fault(std::string("lanes of a warp meet at ") + warp.what + " and at " + what);
  }
  warp.in[thread.lane] = in, warp.out[thread.lane] = out;
  if (static_cast<int>(warp.gate.waiting.size()) + 1 == __builtin_popcount(mask)) {
    compute(warp);
    wake(warp.gate);
    return;
  }
  warp.gate.waiting.push_back(&thread);
  block(what);
}

// ---- Copies.

void Machine::complete(const BulkCopy& done) {
  std::memcpy(done.copy.to, done.copy.from, done.copy.bytes);
  Barrier state;
  std::memcpy(&state, done.barrier, sizeof state);
  state.bytes -= static_cast<int32_t>(done.copy.bytes);
  if (state.bytes == 0 && state.pending == 0) state.phase ^= 1, state.pending = state.expected;
  std::memcpy(done.barrier, &state, sizeof state);
}

void Machine::start_copy(const BulkCopy& copy) {
  if (chance(4)) return complete(copy);
  copies_.push_back(copy);
}

void Machine::finish_a_copy() {
  if (copies_.empty()) return;
  std::swap(copies_[dice_() % copies_.size()], copies_.back());
  const BulkCopy done = copies_.back();
  copies_.pop_back();
  complete(done);
}

void Machine::check_shared(const void* p, size_t bytes, size_t alignment, const char* what) {
  const auto at = reinterpret_cast<uintptr_t>(p), first = reinterpret_cast<uintptr_t>(current_->block->dynamic.get());
  if (at % alignment != 0) fault(std::string(what) + ": misaligned");
  if (at < first || at + bytes > first + current_->block->shared_bytes) fault(std::string(what) + ": outside of shared memory");
}

// ---- Launches.

void Machine::trap() {
  trapped_ = true;
  for (;;) stop();
}

void Machine::fault(const std::string& what) {
  if (current_ == nullptr) throw std::runtime_error("emulated GPU: " + what);
  if (fault_.empty()) fault_ = what;
  for (;;) stop();
}

void Machine::launch_dependents() {
  Block& block = *current_->block;
  if (!block.silent) return;
  block.silent = false;
  changed_ |= --block.grid->silent == 0;
}

void Machine::wait_for_dependencies() {
  Grid* front = current_->block->grid->before.get();
  current_->in_order = true;
  if (front == nullptr || front->ended()) return;
  front->dependents.waiting.push_back(current_);
  block("griddepcontrol.wait");
}

// The next cluster of a launch.
void Machine::start(const std::shared_ptr<Grid>& grid) {
  const Launch& launch = grid->launch;
  const uint64_t row = launch.grid.x / launch.cluster, next = grid->begun++;
  const Index first{static_cast<unsigned>(next % row) * launch.cluster, static_cast<unsigned>(next / row % launch.grid.y),
                    static_cast<unsigned>(next / row / launch.grid.y)};
  auto cluster = std::make_unique<Cluster>();
  cluster->grid = grid;
  const unsigned threads = launch.threads.x;
  for (unsigned rank = 0; rank < launch.cluster; ++rank) {
    auto block = std::make_unique<Block>();
    block->index = {first.x + rank, first.y, first.z};
    block->rank = rank;
    block->cluster = cluster.get();
    block->grid = grid.get();
    block->live = static_cast<int>(threads);
    block->warps.resize((threads + 31) / 32);
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, launch.shared) != 0) throw std::bad_alloc();
    block->dynamic.reset(static_cast<uint8_t*>(memory));
    block->shared_bytes = launch.shared;
    std::memset(memory, 0xff, launch.shared);
    for (unsigned t = 0; t < threads; ++t) {
      auto thread = std::make_unique<Thread>();
      thread->index = {t, 0, 0};
      thread->block = block.get();
      thread->warp = static_cast<int>(t / 32), thread->lane = static_cast<int>(t % 32);
      thread->groups.emplace_back();
      if (stacks_.empty()) {
        thread->stack.reset(new uint8_t[kStack]);
      } else {
        thread->stack = std::move(stacks_.back());
        stacks_.pop_back();
      }
      getcontext(&thread->beginning);
      thread->beginning.uc_stack.ss_sp = thread->stack.get();
      thread->beginning.uc_stack.ss_size = kStack;
      thread->beginning.uc_link = nullptr;
      makecontext(&thread->beginning, &Machine::enter, 0);
      ready_.push_back(thread.get());
      block->threads.push_back(std::move(thread));
    }
    cluster->live += static_cast<int>(threads);
    cluster->blocks.push_back(std::move(block));
  }
  resident_.push_back(std::move(cluster));
}

std::string Machine::stuck() const {
  std::string what = "threads wait for ever:";
  for (const auto& cluster : resident_) {
    for (const auto& block : cluster->blocks) {
      for (const auto& thread : block->threads) {
        if (thread->waits_at == nullptr || what.size() > 400) continue;
        what += " block " + std::to_string(block->index.x) + "," + std::to_string(block->index.y) + " thread " +
                std::to_string(thread->index.x) + " at " + thread->waits_at + ";";
      }
    }
  }
  return what;
}

void Machine::clear() {
  copies_.clear();
  for (auto& cluster : resident_) cluster->live = 0;
  retire();
  ready_.clear();
  under_way_.clear();
}

// Whether a copy to its shared memory is under way.
bool Machine::receives(const Cluster& cluster) const {
  return std::any_of(copies_.begin(), copies_.end(), [&](const BulkCopy& one) {
    return std::any_of(cluster.blocks.begin(), cluster.blocks.end(), [&](const std::unique_ptr<Block>& block) {
      const auto* to = static_cast<const uint8_t*>(one.copy.to);
      return to >= block->dynamic.get() && to < block->dynamic.get() + block->shared_bytes;
    });
  });
}

// Frees what clusters without threads held.
void Machine::retire() {
  std::erase_if(resident_, [&](std::unique_ptr<Cluster>& cluster) {
    if (cluster->live > 0) return false;
    if (!copies_.empty() && receives(*cluster)) fault_ = "a block has left that a copy is under way to";
    for (auto& block : cluster->blocks) {
      for (auto& thread : block->threads) stacks_.push_back(std::move(thread->stack));
    }
    Grid& grid = *cluster->grid;
    if (++grid.left == grid.clusters) grid.before = nullptr, wake(grid.dependents);
    return true;
  });
  std::erase_if(under_way_, [](const std::shared_ptr<Grid>& grid) { return grid->ended(); });
}

// Starts what there is room for.
void Machine::begin() {
  uint64_t running = 0;
  for (const auto& cluster : resident_) running += cluster->blocks.size();
  for (const auto& grid : under_way_) {
    if (grid->before != nullptr && grid->before->silent > 0) return;
    for (; grid->begun < grid->clusters; running += grid->launch.cluster) {
      if (running > 0 && running + grid->launch.cluster > blocks) return;
      start(grid);
    }
  }
}

// One thread goes on until it waits: mostly one of those that have been woken last, whose memory is in the caches.
void Machine::step() {
  if (ready_.empty()) {
    if (copies_.empty()) fault_ = stuck();
    return finish_a_copy();
  }
  const size_t among = chance(64) ? ready_.size() : std::min<size_t>(ready_.size(), 64);
  std::swap(ready_[ready_.size() - 1 - dice_() % among], ready_.back());
  Thread& thread = *ready_.back();
  ready_.pop_back();
  resume(thread);
}

void Machine::run(Launch launch) {
  if (!launch.early) finish();
  if (broken) return;
  patience_ = 1u << 2 * (dice_() % 6);
  auto grid = std::make_shared<Grid>();
  grid->clusters = uint64_t{launch.grid.x / launch.cluster} * launch.grid.y * launch.grid.z;
  grid->silent = grid->clusters * launch.cluster;
  grid->before = under_way_.empty() ? nullptr : under_way_.back();
  grid->launch = std::move(launch);
  under_way_.push_back(std::move(grid));
  finish(queues ? kUnderWay - 1 : 0);
}

void Machine::finish(size_t most) {
  const auto ended = [&] { return trapped_ || !fault_.empty(); };
  while (!ended()) {
    retire();
    if (ended() || under_way_.size() <= most) break;
    begin();
    for (changed_ = false; !changed_ && !ended();) step();
  }
  if (!ended()) return;
  clear();
  broken |= trapped_;
  trapped_ = false;
  const std::string what = std::exchange(fault_, "");
  if (!what.empty()) throw std::runtime_error("emulated GPU: " + what);
}

}  // namespace simt
