#include "machine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "clock.h"

#if SIMT_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

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
  Fiber& fiber = *thread.fiber;
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(&home_fake_, fiber.stack.get(), kStack);
#endif
  if (_setjmp(home_) == 0) {  // jumps, since swapcontext needs two system calls
    if (fiber.started) _longjmp(fiber.here, 1);
    fiber.started = true;
    ucontext_t beginning;
    getcontext(&beginning);
    beginning.uc_stack.ss_sp = fiber.stack.get();
    beginning.uc_stack.ss_size = kStack;
    beginning.uc_link = nullptr;
    makecontext(&beginning, &Machine::enter, 0);
    setcontext(&beginning);
  }
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(home_fake_, nullptr, nullptr);
#endif
  current_ = nullptr;
}

void Machine::stop() {
  Fiber& fiber = *current_->fiber;
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(&fiber.fake_stack, home_stack_, home_size_);
#endif
  if (_setjmp(fiber.here) == 0) _longjmp(home_, 1);
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &home_stack_, &home_size_);
#endif
}

void Machine::enter() {
  Machine& machine = get();
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &machine.home_stack_, &machine.home_size_);
#endif
  for (;;) {  // one thread after the other
    machine.current_->block->grid->launch.body();
    machine.leave(*machine.current_);
    machine.stop();
  }
}

void Machine::leave(Thread& thread) {
  Block& block = *thread.block;
  if (clock && block.live == 1) thread.its_warp().now += clock->costs.drain;
  settle();
  if (block.grid->launch.early && !thread.in_order) fault("a thread has ended that did not wait for the launch in front");
  thread.ended = true;
  --block.live, --block.cluster->live;
  if (block.live == 0) launch_dependents();
  // threads at a barrier no longer wait for the one that has ended
  if (block.live > 0 && static_cast<int>(block.gate.waiting.size()) == block.live) wake(block.gate);
  changed_ |= block.cluster->live == 0;
  if (block.cluster->live > 0 && static_cast<int>(block.cluster->gate.waiting.size()) == block.cluster->live) {
    wake(block.cluster->gate);
  }
}

void Machine::yield() {
  if (clock) {
    clock->issue(current_->its_warp(), 1, clock->costs.l2);
    clock->ready(*current_);
    return stop();
  }
  ready_.push_back(current_);
  if (chance(patience_)) std::swap(ready_[dice_() % ready_.size()], ready_.back());  // behind others
  stop();
}

void Machine::block(const char* what) {
  current_->waits_at = what;
  stop();
  current_->waits_at = nullptr;
}

void Machine::settle() {
  if (!clock || current_->its_warp().now <= clock->now) return;
  clock->ready(*current_);
  stop();
}

void Machine::wake(Gate& gate) {
  if (clock) {
    for (Thread* thread : gate.waiting) clock->ready(*thread);
    return gate.waiting.clear();
  }
  ready_.insert(ready_.end(), gate.waiting.begin(), gate.waiting.end());
  gate.waiting.clear();
}

void Machine::meet(Gate& gate, int expected, const char* what) {
  settle();
  if (static_cast<int>(gate.waiting.size()) + 1 == expected) {
    if (clock) clock->pass(*current_, gate);
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
    if (clock) clock->pass(warp, what);
    wake(warp.gate);
    return;
  }
  warp.gate.waiting.push_back(&thread);
  block(what);
}

// ---- Traps and faults, which do not return.

void Machine::trap() {
  trapped_ = true;
  for (;;) stop();
}

void Machine::fault(const std::string& what) {
  if (current_ == nullptr) throw std::runtime_error("emulated GPU: " + what);
  if (fault_.empty()) fault_ = what;
  for (;;) stop();
}

// ---- Copies.

void Machine::signal(uint64_t* barrier, uint32_t bytes) {
  settle();
  const BulkCopy stored{{nullptr, nullptr, bytes}, barrier};
  if (!clock) return complete(stored);
  clock->schedule(clock->now + clock->costs.peer, stored);
}

void Machine::product() {
  if (current_->lane != 0) return;
  settle();
  clock->product(current_->its_warp());
}

void Machine::load_from_peer(size_t bytes) {
  if (clock) clock->load(*current_, bytes, clock->costs.peer);
}

void Machine::load_async() {
  if (clock) clock->load_async(*current_, 16);
}

void Machine::await_async() {
  if (clock) clock->use_loads(current_->its_warp());
}

uint64_t Machine::virtual_ns() const {
  return static_cast<uint64_t>(current_->its_warp().now / Clock::kGhz);
}

void Machine::change_barrier(uint64_t* barrier, uint32_t arrivals, int32_t bytes) {
  Barrier state;
  std::memcpy(&state, barrier, sizeof state);
  if (arrivals > state.pending) fault("mbarrier: more arrivals than its phase expects");
  state.pending = (state.pending - arrivals) & 0xffff;
  state.bytes += bytes;
  const bool ends = state.bytes == 0 && state.pending == 0;
  if (ends) state.phase ^= 1, state.pending = state.expected;
  std::memcpy(barrier, &state, sizeof state);
  if (clock && ends) wake(clock->waiting[barrier]);
}

void Machine::await(uint64_t* barrier) {
  if (clock) {
    clock->waiting[barrier].waiting.push_back(current_);
    return block("an mbarrier");
  }
  finish_a_copy();
  yield();
}

void Machine::complete(const BulkCopy& done) {
  if (done.copy.from != nullptr) std::memcpy(done.copy.to, done.copy.from, done.copy.bytes);
  change_barrier(done.barrier, done.copy.bytes == 0 ? 1 : 0, -static_cast<int32_t>(done.copy.bytes));
}

void Machine::start_copy(const BulkCopy& copy, bool cached) {
  if (clock) return clock->schedule(clock->arrival(*current_, copy.copy.bytes, cached), copy);
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

}  // namespace simt
