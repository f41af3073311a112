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

// Calls `one(offset, bytes)` for each part of a message that fits the lines of an epoch, until one fails.
template <class One>
bool in_parts(const ll::Layout& layout, int64_t bytes, One one) {
  const int64_t most = layout.lines * ll::kLineBytes;
  for (int64_t begin = 0; begin < bytes; begin += most) {
    if (!one(begin, std::min(most, bytes - begin))) return false;
  }
  return true;
}

}  // namespace

Group::Group(const std::string& name, int rank, int size, int64_t capacity, double attach_seconds,
             const Patience& patience)
    : layout_{size, 1, ll::lines_for(capacity)},
      segment_(name, rank, size, static_cast<size_t>(size * layout_.inbox_lines()) * sizeof(ll::Line), attach_seconds,
               patience),
      session_{layout_, rank, 0, 0, {}} {
  auto* lines = reinterpret_cast<ll::Line*>(segment_.data());
  for (int r = 0; r < size; ++r) session_.inbox[r] = lines + r * layout_.inbox_lines();
}

void Group::all_reduce(void* x, int64_t count, Element element, double seconds) {
  check_usable();
  Waiter wait(segment_, seconds);
  auto* bytes = static_cast<uint8_t*>(x);
  bool done = false;
  switch (element) {
    case Element::kFloat32: done = reduce<ll::Float32>(bytes, count * 4, wait); break;
    case Element::kFloat64: done = reduce<ll::Float64>(bytes, count * 8, wait); break;
    case Element::kBfloat16: done = reduce<ll::Bfloat16>(bytes, count * 2, wait); break;
  }
  if (!done) give_up(wait);
}

void Group::all_gather(const void* x, int64_t bytes, void* out, double seconds) {
  check_usable();
  if (bytes == 0) return;
  Waiter wait(segment_, seconds);
  if (!gather(static_cast<const uint8_t*>(x), bytes, static_cast<uint8_t*>(out), wait)) give_up(wait);
}

template <class E>
bool Group::reduce(uint8_t* x, int64_t bytes, Waiter& wait) {
  return in_parts(layout_, bytes, [&](int64_t begin, int64_t size) {
    uint8_t* part = x + begin;
    const int64_t lines = ll::lines_for(size);
    const auto session = session_;  // a copy that no store can alias keeps its addresses in registers: half the time
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

bool Group::gather(const uint8_t* x, int64_t bytes, uint8_t* out, Waiter& wait) {
  std::memcpy(out + session_.rank * bytes, x, static_cast<size_t>(bytes));
  return in_parts(layout_, bytes, [&](int64_t begin, int64_t size) {
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

void Group::check_usable() const {
  if (!broken_.empty()) throw PeerLost(broken_);
}

std::string Group::describe(const ll::Trouble& t) const {
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

void Group::give_up(const Waiter& wait) {
  const auto rank = static_cast<uint8_t>(session_.rank), source = static_cast<uint8_t>(wait.source());
  const ll::Trouble mine{wait.reason(), rank, source, static_cast<uint8_t>(ll::slot_of(session_.epoch)),
                         static_cast<uint32_t>(session_.epoch)};
  const bool own = mine.reason != ll::Reason::kNone;
  if (own) replace(segment_.trouble(), uint64_t{0}, ll::pack(mine));
  broken_ = describe(own ? mine : ll::trouble_of(load(segment_.trouble())));
  if (mine.reason == ll::Reason::kInterrupted) throw Interrupted();
  if (mine.reason == ll::Reason::kTimeout) throw TimedOut(broken_ + ": " + wait.limit());
  throw PeerLost(broken_);
}

}  // namespace swiftspec::host
