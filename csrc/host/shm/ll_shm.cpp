#include "host/shm/ll_shm.h"

#include <algorithm>
#include <cstring>

namespace swiftspec::host {

namespace {

uint64_t read_line(const uint8_t* x, int64_t line, int64_t bytes) {
  const int64_t at = line * ll::kLineBytes;
  uint64_t payload = 0;
  if (bytes - at >= ll::kLineBytes) {
    std::memcpy(&payload, x + at, ll::kLineBytes);
  } else {
    std::memcpy(&payload, x + at, static_cast<size_t>(bytes - at));
  }
  return payload;
}

void write_line(uint8_t* x, int64_t line, int64_t bytes, uint64_t payload) {
  const int64_t at = line * ll::kLineBytes;
  if (bytes - at >= ll::kLineBytes) {
    std::memcpy(x + at, &payload, ll::kLineBytes);
  } else {
    std::memcpy(x + at, &payload, static_cast<size_t>(bytes - at));
  }
}

// Calls `one(offset, bytes)` for each piece of a message that fits one epoch, until a call fails.
template <class One>
bool for_each_epoch(const ll::Layout& layout, int64_t bytes, One one) {
  const int64_t max_bytes = layout.lines * ll::kLineBytes;
  for (int64_t begin = 0; begin < bytes; begin += max_bytes) {
    if (!one(begin, std::min(max_bytes, bytes - begin))) return false;
  }
  return true;
}

}  // namespace

ShmGroup::ShmGroup(const std::string& name, int rank, int size, int64_t capacity, double attach_timeout_s,
                   const WaitPolicy& policy)
    : layout_{size, 1, ll::lines_for(capacity)},
      segment_(name, rank, size, static_cast<size_t>(size * layout_.inbox_lines()) * sizeof(ll::Line), attach_timeout_s,
               policy),
      session_{layout_, rank, 0, 0, {}} {
  auto* lines = reinterpret_cast<ll::Line*>(segment_.data());
  for (int r = 0; r < size; ++r) session_.inbox[r] = lines + r * layout_.inbox_lines();
}

void ShmGroup::all_reduce(void* x, int64_t count, Element element, double timeout_s) {
  check_usable();
  Waiter wait(segment_, timeout_s);
  auto* bytes = static_cast<uint8_t*>(x);
  bool done = false;
  switch (element) {
    case Element::kFloat32: done = reduce<ll::Float32>(bytes, count * 4, wait); break;
    case Element::kFloat64: done = reduce<ll::Float64>(bytes, count * 8, wait); break;
    case Element::kBfloat16: done = reduce<ll::Bfloat16>(bytes, count * 2, wait); break;
  }
  if (!done) throw_error(wait);
}

void ShmGroup::all_gather(const void* x, int64_t bytes, void* out, double timeout_s) {
  check_usable();
  if (bytes == 0) return;
  Waiter wait(segment_, timeout_s);
  if (!gather(static_cast<const uint8_t*>(x), bytes, static_cast<uint8_t*>(out), wait)) throw_error(wait);
}

template <class E>
bool ShmGroup::reduce(uint8_t* x, int64_t bytes, Waiter& wait) {
  return for_each_epoch(layout_, bytes, [&](int64_t begin, int64_t size) {
    uint8_t* part = x + begin;
    const int64_t lines = ll::lines_for(size);
    const auto session = session_;  // a local copy, which no store can alias, stays in registers: halves the time
    for (int64_t i = 0; i < lines; ++i) session.broadcast(i, read_line(part, i, size));
    for (int64_t i = 0; i < lines; ++i) {
      uint64_t total;
      if (!session.template reduce<E>(i, read_line(part, i, size), total, wait)) return false;
      write_line(part, i, size, total);
    }
    session_.finish(lines);
    return true;
  });
}

bool ShmGroup::gather(const uint8_t* x, int64_t bytes, uint8_t* out, Waiter& wait) {
  std::memcpy(out + session_.rank * bytes, x, static_cast<size_t>(bytes));
  return for_each_epoch(layout_, bytes, [&](int64_t begin, int64_t size) {
    const int64_t lines = ll::lines_for(size);
    const auto session = session_;  // as above
    for (int64_t i = 0; i < lines; ++i) session.broadcast(i, read_line(x + begin, i, size));
    for (int source = 0; source < layout_.ranks; ++source) {
      if (source == session.rank) continue;
      for (int64_t i = 0; i < lines; ++i) {
        uint64_t payload;
        if (!session.receive(source, i, payload, wait)) return false;
        write_line(out + source * bytes + begin, i, size, payload);
      }
    }
    session_.finish(lines);
    return true;
  });
}

void ShmGroup::check_usable() const {
  if (!error_.empty()) throw PeerLost(error_);
}

std::string ShmGroup::describe(const ll::Fault& t) const {
  const std::string rank = "rank " + std::to_string(t.rank), source = "rank " + std::to_string(t.source);
  const std::string where = " (slot " + std::to_string(t.slot) + ", epoch " + std::to_string(t.epoch) + ")";
  switch (t.reason) {
    case ll::Reason::kTimeout: return rank + " waited too long for " + source + where;
    case ll::Reason::kEnded:
      return source + " (process " + std::to_string(segment_.pid(t.source)) + ") has ended; " + rank +
             " waited for it" + where;
    case ll::Reason::kLeft: return source + " has left the group; " + rank + " waited for it" + where;
    default: return rank + " was interrupted while it waited for " + source + where;
  }
}

void ShmGroup::throw_error(const Waiter& wait) {
  const auto rank = static_cast<uint8_t>(session_.rank), source = static_cast<uint8_t>(wait.source());
  const ll::Fault mine{wait.reason(), rank, source, static_cast<uint8_t>(ll::slot_of(session_.epoch)),
                         static_cast<uint32_t>(session_.epoch)};
  const bool own = mine.reason != ll::Reason::kNone;
  if (own) compare_exchange(segment_.fault(), uint64_t{0}, ll::encode_fault(mine));
  error_ = describe(own ? mine : ll::decode_fault(load(segment_.fault())));
  if (mine.reason == ll::Reason::kInterrupted) throw Interrupted();
  if (mine.reason == ll::Reason::kTimeout) throw TimedOut(error_ + ": " + wait.limit());
  throw PeerLost(error_);
}

}  // namespace swiftspec::host
