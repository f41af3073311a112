// The queue of launches, and which blocks of them run.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "clock.h"
#include "machine.h"

namespace simt {
namespace {

constexpr size_t kAlignment = 1024;
// Launches under way, of which all but the first are early. Between the attention kernels of two layers there are four.
constexpr size_t kUnderWay = 3, kMostUnderWay = 6;
constexpr uint64_t kSteps = 4096;  // from one pause to the next, a few milliseconds

}  // namespace

void Machine::launch_dependents() {
  settle();
  Block& block = *current_->block;
  if (!block.silent) return;
  block.silent = false;
  changed_ |= --block.grid->silent == 0;
}

void Machine::wait_for_dependencies() {
  Grid* front = current_->block->grid->before.get();
  current_->in_order = true;
  settle();
  if (front != nullptr && !front->ended()) {
    front->dependents.waiting.push_back(current_);
    block("griddepcontrol.wait");
  }
  if (clock) clock->release(*current_);
}

unsigned Machine::clusters(unsigned blocks) const {
  unsigned count = 0;
  for (const unsigned part : parts) count += part / blocks;
  return count;
}

// The part in which a cluster of this size fits. One cluster always fits.
bool Machine::find_room(const Launch& launch, size_t& part) const {
  part = 0;
  if (clock) return clock->has_room(launch);
  const unsigned blocks = launch.cluster;
  std::vector<size_t> used(parts.size(), 0);
  for (const auto& cluster : resident_) used[cluster->part] += cluster->blocks.size();
  for (part = 0; part < parts.size(); ++part) {
    if (used[part] + blocks <= parts[part]) return true;
  }
  part = 0;
  return resident_.empty();
}

// The next cluster of a launch.
void Machine::start(const std::shared_ptr<Grid>& grid, size_t part) {
  const Launch& launch = grid->launch;
  const uint64_t row = launch.grid.x / launch.cluster, next = grid->begun++;
  const Index first{static_cast<unsigned>(next % row) * launch.cluster, static_cast<unsigned>(next / row % launch.grid.y),
                    static_cast<unsigned>(next / row / launch.grid.y)};
  const std::vector<Sm*> places = clock ? clock->place(launch) : std::vector<Sm*>(launch.cluster, nullptr);
  auto cluster = std::make_unique<Cluster>();
  cluster->grid = grid;
  cluster->part = part;
  const unsigned threads = launch.threads.x;
  for (unsigned rank = 0; rank < launch.cluster; ++rank) {
    auto block = std::make_unique<Block>();
    block->index = {first.x + rank, first.y, first.z};
    block->rank = rank;
    block->cluster = cluster.get();
    block->grid = grid.get();
    block->live = static_cast<int>(threads);
    block->warps.resize((threads + 31) / 32);
    block->sm = places[rank];
    if (clock) clock->start(*block, launch.early);
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
      if (fibers_.empty()) fibers_.push_back(std::make_unique<Fiber>());
      thread->fiber = std::move(fibers_.back());
      fibers_.pop_back();
      if (clock) {
        clock->ready(*thread);
      } else {
        ready_.push_back(thread.get());
      }
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
  if (clock) clock->clear();
  for (auto& cluster : resident_) cluster->live = 0;
  retire();
  ready_.clear();
  under_way_.clear();
}

// Whether a copy to its shared memory is in flight.
bool Machine::receives(const Cluster& cluster) const {
  return std::any_of(copies_.begin(), copies_.end(), [&](const BulkCopy& one) {
    return std::any_of(cluster.blocks.begin(), cluster.blocks.end(), [&](const std::unique_ptr<Block>& block) {
      const auto* to = static_cast<const uint8_t*>(one.copy.to);
      return to >= block->dynamic.get() && to < block->dynamic.get() + block->shared_bytes;
    });
  });
}

// Frees the resources of clusters whose threads have ended.
void Machine::retire() {
  std::erase_if(resident_, [&](std::unique_ptr<Cluster>& cluster) {
    if (cluster->live > 0) return false;
    if (!copies_.empty() && receives(*cluster)) fault_ = "a block has left that a copy is under way to";
    for (auto& block : cluster->blocks) {
      if (clock) clock->remove(*block);
      for (auto& thread : block->threads) {
        thread->fiber->started &= thread->ended;  // the others stopped in the middle
        fibers_.push_back(std::move(thread->fiber));
      }
    }
    Grid& grid = *cluster->grid;
    if (++grid.left == grid.clusters) {
      grid.before = nullptr;
      if (clock) clock->ends.push_back(clock->now);
      wake(grid.dependents);
    }
    return true;
  });
  std::erase_if(under_way_, [](const std::shared_ptr<Grid>& grid) { return grid->ended(); });
}

// Starts the clusters for which there is room.
void Machine::begin() {
  for (const auto& grid : under_way_) {
    if (grid->before != nullptr && grid->before->silent > 0) return;
    while (grid->begun < grid->clusters) {
      size_t part = 0;
      if (!find_room(grid->launch, part)) return;
      start(grid, part);
    }
  }
}

// Runs a thread of the earliest warp until it waits, or completes a copy that arrives before.
void Machine::step_in_time() {
  if (clock->event_is_next()) return complete(clock->next_event().copy);
  Thread* thread = clock->next();
  if (thread == nullptr) {
    fault_ = stuck();
  } else {
    resume(*thread);
  }
}

// Runs one thread until it waits: mostly one of those that were woken last, whose memory is in the caches.
void Machine::step() {
  if (clock) return step_in_time();
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

// Allows a signal to end a kernel that spins for ever.
void Machine::look_up() {
  if (++steps_ % kSteps != 0) return;
  try {
    pause();
  } catch (...) {
    clear();
    throw;
  }
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
  finish(!queues ? 0 : clock ? kUnderWay - 1 : kUnderWay - 1 + dice_() % (kMostUnderWay - kUnderWay + 1));
}

void Machine::finish(size_t most) {
  const auto ended = [&] { return trapped_ || !fault_.empty(); };
  while (!ended()) {
    retire();
    if (ended() || under_way_.size() <= most) break;
    begin();
    for (changed_ = false; !changed_ && !ended(); look_up()) step();
  }
  if (!ended()) return;
  clear();
  broken |= trapped_;
  trapped_ = false;
  const std::string what = std::exchange(fault_, "");
  if (!what.empty()) throw std::runtime_error("emulated GPU: " + what);
}

}  // namespace simt
