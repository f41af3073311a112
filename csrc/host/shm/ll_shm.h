// Collectives among the ranks of one machine by the LL protocol over shared memory. Not thread-safe. Waits throw
// TimedOut, PeerLost or Interrupted.
#pragma once

#include <cstdint>
#include <string>

#include "host/shm/atomic.h"
#include "host/shm/segment.h"

namespace swiftspec::host {

enum class Element { kFloat32, kFloat64, kBfloat16 };

// Collectives among `size` ranks. All ranks make the same calls with the same sizes. A message longer than `capacity`
// bytes takes several epochs. After an exception the group is unusable, on every rank.
class ShmGroup {
 public:
  ShmGroup(const std::string& name, int rank, int size, int64_t capacity, double attach_timeout_s,
           const WaitPolicy& policy);

  // In place; sums in rank order, bfloat16 in float32 and rounded once.
  void all_reduce(void* x, int64_t count, Element element, double timeout_s);
  void all_gather(const void* x, int64_t bytes, void* out, double timeout_s);  // out [size, bytes]
  void leave() { segment_.leave(); }
  int size() const { return layout_.ranks; }
  int rank() const { return session_.rank; }

 private:
  template <class E>
  bool reduce(uint8_t* x, int64_t bytes, Waiter& wait);
  bool gather(const uint8_t* x, int64_t bytes, uint8_t* out, Waiter& wait);
  void check_usable() const;
  [[noreturn]] void throw_error(const Waiter& wait);
  std::string describe(const ll::Fault& fault) const;

  ll::Layout layout_;
  Segment segment_;
  ll::Session<Memory> session_;
  std::string error_;  // set once the group is unusable
};

}  // namespace swiftspec::host
