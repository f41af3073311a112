// Collectives among the ranks of one machine: LL over shared memory. One thread at a time uses a group. A wait throws
// TimedOut, PeerLost or Interrupted.
#pragma once

#include <cstdint>
#include <string>

#include "host/shm/atomic.h"
#include "host/shm/segment.h"

namespace swiftspec::host {

enum class Element { kFloat32, kFloat64, kBfloat16 };

// Collectives among `size` ranks. All ranks make the same calls with the same sizes. A message longer than `capacity`
// bytes goes in several epochs. Once a call has thrown, the group is of no more use and every rank is told.
class Group {
 public:
  Group(const std::string& name, int rank, int size, int64_t capacity, double attach_seconds,
        const Patience& patience);

  // In place; sums in the order of the ranks, bfloat16 in float32 and rounded once.
  void all_reduce(void* x, int64_t count, Element element, double seconds);
  void all_gather(const void* x, int64_t bytes, void* out, double seconds);  // out [size, bytes]
  void leave() { segment_.leave(); }
  int size() const { return layout_.ranks; }
  int rank() const { return session_.rank; }

 private:
  template <class E>
  bool reduce(uint8_t* x, int64_t bytes, Waiter& wait);
  bool gather(const uint8_t* x, int64_t bytes, uint8_t* out, Waiter& wait);
  void check_usable() const;
  [[noreturn]] void give_up(const Waiter& wait);
  std::string describe(const ll::Trouble& trouble) const;

  ll::Layout layout_;
  Segment segment_;
  ll::Session<Memory> session_;
  std::string broken_;  // why nothing more can be done
};

}  // namespace swiftspec::host
