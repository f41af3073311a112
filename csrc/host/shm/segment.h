// Shared memory of a few processes on one machine: how they meet, and how one learns that another has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/ll.h"

namespace swiftspec::host {

struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PeerLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Interrupted {};

// How a rank waits.
struct Patience {
  bool spin;             // every rank of this machine has a core; otherwise a waiting rank gives its core away at once
  bool (*interrupted)();  // asked now and then: whether the user wants out; or null
};

class Segment {
 public:
  // Rank 0 creates `name` (private to the user), the others open it, the last one to come removes the name; all return
  // when `size` ranks are there. Throws TimedOut after `seconds`, PeerLost, std::invalid_argument, std::system_error.
  Segment(const std::string& name, int rank, int size, size_t bytes, double seconds, const Patience& patience);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  uint8_t* data() const;   // [bytes], zeros at the start, aligned to 64
  uint64_t& trouble() const;  // ll::Trouble in one word; the first to give up sets it
  int rank() const { return rank_; }
  int size() const { return size_; }

  void leave();  // tells the others that nothing more will come
  bool has_left(int rank) const;
  bool has_ended(int rank);  // the process is gone, reaped or not
  int32_t pid(int rank) const;

  unsigned spins;                // what the next wait may spin: 0 for good, or as the last ones went
  bool (*const interrupted)();   // of Patience

 private:
  struct Header;
  void map(int fd, bool create, double until);
  void join(double until);
  void release();

  std::string name_;
  int rank_, size_;
  size_t bytes_;
  Header* header_ = nullptr;
  std::vector<int> watches_;  // pidfd of each rank, or -1
};

// The wait of a rank for another: spins, then yields, then sleeps; looks now and then whether it should give up.
class Waiter {
 public:
  Waiter(Segment& segment, double seconds) : segment_(segment), seconds_(seconds) {}
  ~Waiter() { rest(); }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  void rest();
  bool again(int source);
  ll::Reason reason() const { return reason_; }  // kNone: because another rank had given up
  int source() const { return source_; }
  std::string limit() const;  // how long it may wait, for a message

 private:
  bool should_stop(int source, double time);

  Segment& segment_;
  double seconds_;
  double began_ = 0, next_check_ = 0;
  unsigned looks_ = 0;
  int source_ = -1;
  ll::Reason reason_ = ll::Reason::kNone;
};

}  // namespace swiftspec::host
