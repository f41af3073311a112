// Shared memory of the processes of one machine: rendezvous by name, and detection of ended processes.
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

// How a rank waits for another.
struct WaitPolicy {
  bool spin;              // set if every rank of this machine has its own core; else waiting ranks yield immediately
  bool (*interrupted)();  // polled while waiting: true aborts the wait; or null
};

class Segment {
 public:
  // Rank 0 creates `name` (private to the user), the other ranks open it, and the last one unlinks it. Returns when all
  // `size` ranks have joined. Throws TimedOut after `timeout_s`, PeerLost if a rank ends before, std::invalid_argument
  // if the ranks disagree about the sizes, and std::system_error if the memory cannot be created.
  Segment(const std::string& name, int rank, int size, size_t bytes, double timeout_s, const WaitPolicy& policy);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  uint8_t* data() const;      // [bytes], initially zeros, aligned to 64
  uint64_t& fault() const;  // packed ll::Fault, set by the first rank that gives up
  int rank() const { return rank_; }
  int size() const { return size_; }

  void leave();  // announces that this rank sends nothing more
  bool has_left(int rank) const;
  bool has_ended(int rank);  // the process has exited, reaped or not
  int32_t pid(int rank) const;

  unsigned spins;               // spin count of the next wait, adapted by Waiter; 0: never spin
  bool (*const interrupted)();  // of WaitPolicy

 private:
  struct Header;
  void map(int fd, bool create, double deadline_s);
  void join(double deadline_s);
  void release();

  std::string name_;
  int rank_, size_;
  size_t bytes_;
  Header* header_ = nullptr;
  std::vector<int> pidfds_;  // one per rank, or -1
};

// Waits for another rank: spins, then yields, then sleeps, and checks periodically whether to give up.
class Waiter {
 public:
  Waiter(Segment& segment, double timeout_s) : segment_(segment), timeout_s_(timeout_s) {}
  ~Waiter() { begin(); }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  void begin();                   // starts a wait; adapts the spin count to how the previous one ended
  bool keep_waiting(int source);  // pauses for a moment; returns false if the wait for rank `source` must end
  ll::Reason reason() const { return reason_; }  // kNone: another rank gave up first
  int source() const { return source_; }
  std::string limit() const;  // the time limit as text

 private:
  bool should_stop(int source, double time);

  Segment& segment_;
  double timeout_s_;
  double began_s_ = 0, next_check_s_ = 0;
  unsigned polls_ = 0;
  int source_ = -1;
  ll::Reason reason_ = ll::Reason::kNone;
};

}  // namespace swiftspec::host
