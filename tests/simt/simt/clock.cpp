#include "clock.h"

#include <algorithm>
#include <utility>

namespace simt {
namespace {

constexpr unsigned kWarpsPerSm = 16;  // of 128 registers per thread, as projections of few rows have
constexpr size_t kSharedPerSm = 233472, kReserved = 1024;  // bytes; of a block

unsigned warps_of(const Launch& launch) { return (launch.threads.x + 31) / 32; }

}  // namespace

double* Costs::named(std::string_view name) {
  const std::pair<std::string_view, double*> all[] = {
      {"launch", &launch}, {"cluster", &cluster}, {"access", &access},   {"product", &product}, {"tile", &tile},
      {"shared", &shared}, {"l2", &l2},           {"peer", &peer},       {"shuffle", &shuffle}, {"block", &block},
      {"copy", &copy},     {"port", &port},       {"memory", &memory},   {"start", &start},     {"drain", &drain},
      {"release", &release}, {"plain", &plain}};
  for (const auto& [known, cost] : all) {
    if (known == name) return cost;
  }
  return nullptr;
}

// SMs with room for a block, those with the fewest warps first, as a GPU distributes blocks.
std::vector<Sm*> Clock::candidates(const Launch& launch) {
  std::vector<Sm*> found;
  for (Sm& sm : sms_) {
    const bool fits = sm.warps + warps_of(launch) <= kWarpsPerSm && sm.shared + launch.shared + kReserved <= kSharedPerSm;
    if (fits) found.push_back(&sm);
  }
  std::stable_sort(found.begin(), found.end(), [](const Sm* a, const Sm* b) { return a->warps < b->warps; });
  return found;
}

std::vector<Sm*> Clock::place(const Launch& launch) {
  std::vector<Sm*> found = candidates(launch);
  found.resize(launch.cluster);
  for (Sm* sm : found) sm->warps += warps_of(launch), sm->shared += launch.shared + kReserved;
  return found;
}

// Without early starts, the launches in front have ended now.
void Clock::start(Block& block, bool early) {
  block.sm->l1.clear();
  const double at = now + costs.start + (early ? 0 : costs.plain + costs.launch);
  for (size_t warp = 0; warp < block.warps.size(); ++warp) {
    block.warps[warp].now = at;
    block.warps[warp].scheduler = &block.sm->schedulers[warp % 4];
  }
}

void Clock::release(Thread& thread) {
  if (ends.empty() || !thread.block->grid->launch.early) return;
  Warp& warp = thread.its_warp();
  warp.now = std::max(warp.now, ends.back() + costs.release + costs.launch);
}

void Clock::remove(const Block& block) {
  block.sm->warps -= static_cast<unsigned>(block.warps.size());
  block.sm->shared -= block.shared_bytes + kReserved;
}

void Clock::ready(Thread& thread) {
  Warp& warp = thread.its_warp();
  warp.now = std::max(warp.now, now);
  if (warp.ready.empty()) turns_.push({warp.now, ++order_, &warp});
  warp.ready.push_back(&thread);
}

Thread* Clock::next() {
  if (running_.empty()) {
    if (turns_.empty()) return nullptr;
    now = std::max(now, turns_.top().at);
    running_.swap(turns_.top().warp->ready);
    turns_.pop();
  }
  Thread* thread = running_.back();
  running_.pop_back();
  return thread;
}

bool Clock::event_is_next() const {
  return running_.empty() && !events_.empty() && (turns_.empty() || events_.top().at <= turns_.top().at);
}

Event Clock::next_event() {
  const Event event = events_.top();
  events_.pop();
  now = std::max(now, event.at);
  return event;
}

void Clock::clear() {
  turns_ = {}, events_ = {};
  running_.clear(), waiting.clear();
}

void Clock::issue(Warp& warp, double instructions, double latency) {
  *warp.scheduler = std::max(*warp.scheduler, warp.now) + instructions;
  warp.now = std::max(*warp.scheduler, warp.now + latency);
}

void Clock::pass(Thread& last, const Gate& gate) {
  const double at = now + (&gate == &last.block->gate ? costs.block : costs.cluster);
  last.its_warp().now = at;
  for (const Thread* thread : gate.waiting) thread->its_warp().now = at;
  if (&gate == &last.block->cluster->gate) {
    for (const auto& block : last.block->cluster->blocks) block->sm->l1.clear();
  }
}

void Clock::pass(Warp& warp, std::string_view what) {
  const bool exchange = what.starts_with("__shfl");
  if (exchange) use_loads(warp);
  issue(warp, 1, exchange ? costs.shuffle : 0);
}

void Clock::product(Warp& warp) {
  use_loads(warp);
  issue(warp, costs.issue(), costs.product);
}

void Clock::load(Thread& thread, size_t bytes, double latency) {
  if (thread.lane != 0) return;
  Warp& warp = thread.its_warp();
  issue(warp, costs.access * static_cast<double>(bytes) / 16);
  warp.loaded = std::max(warp.loaded, warp.now + latency);
}

// From L2, through the port of the SM; each lane loads other bytes.
void Clock::load_async(Thread& thread, size_t bytes) {
  Warp& warp = thread.its_warp();
  double& port = thread.block->sm->port;
  port = std::max(port, warp.now) + static_cast<double>(bytes) / costs.port;
  warp.loaded = std::max(warp.loaded, port);
  load(thread, bytes, costs.l2);
}

void Clock::load_device(Thread& thread, const void* from, size_t bytes) {
  constexpr uintptr_t kLine = 32;
  if (thread.block->sm->l1.insert(reinterpret_cast<uintptr_t>(from) / kLine).second) return load_async(thread, bytes);
  load(thread, bytes, costs.shared);
}

void Clock::store(Thread& thread, size_t bytes) {
  if (thread.lane != 0) return;
  use_loads(thread.its_warp());
  issue(thread.its_warp(), costs.access * static_cast<double>(bytes) / 16);
}

double Clock::arrival(Thread& thread, double bytes, bool cached) {
  const double from = thread.its_warp().now;
  double& port = thread.block->sm->port;
  port = std::max(port, from) + bytes / costs.port;
  if (!cached) memory_ = std::max(memory_, from) + bytes / costs.memory;
  return std::max({from + costs.copy, port, cached ? 0 : memory_});
}

}  // namespace simt
