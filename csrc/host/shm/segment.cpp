#include "host/shm/segment.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <thread>

#include "host/pause.h"
#include "host/shm/atomic.h"

namespace swiftspec::host {

namespace {

constexpr uint64_t kMagic = 0x53776966744c4c31;

// Waiting time after which a rank stops yielding and takes short sleeps, and after which it takes long ones.
constexpr double kYieldS = 5e-3, kNapS = 100e-3;
constexpr auto kShortSleep = std::chrono::microseconds(50);
constexpr auto kLongSleep = std::chrono::microseconds(500);
constexpr double kCheckIntervalS = 20e-3;  // of the checks for ended processes and signals
constexpr unsigned kMaxSpins = 512;        // about 20 us
constexpr unsigned kMinSpins = 16;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

struct File {  // closes the descriptor at the end of the scope
  int fd;
  ~File() {
    if (fd >= 0) close(fd);
  }
};

// A pidfd, which polls as readable once the process has ended, reaped or not; -1 if unavailable.
int open_pidfd([[maybe_unused]] int32_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  errno = ENOSYS;
  return -1;
#endif
}

// Sets the size of new shared memory, on Linux with its pages: a full /dev/shm is an error here, and would be SIGBUS at
// the first store. Returns 0 or the error number.
int allocate(int fd, size_t bytes) {
#ifdef __linux__
  return posix_fallocate(fd, 0, static_cast<off_t>(bytes));
#else
  return ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
#endif
}

}  // namespace

struct Segment::Header {
  uint64_t magic;  // stored last by rank 0
  uint64_t bytes;
  int32_t size;
  int32_t joined;
  alignas(64) uint64_t fault;
  struct alignas(64) RankEntry {
    int32_t pid, left;
  } ranks[ll::kMaxRanks];
};

uint8_t* Segment::data() const { return reinterpret_cast<uint8_t*>(header_ + 1); }
uint64_t& Segment::fault() const { return header_->fault; }
void Segment::leave() { store(header_->ranks[rank_].left, 1); }
bool Segment::has_left(int rank) const { return load(header_->ranks[rank].left) != 0; }
int32_t Segment::pid(int rank) const { return load(header_->ranks[rank].pid); }

bool Segment::has_ended(int rank) {
  int& fd = pidfds_[rank];
  if (fd < 0 && pid(rank) != 0) fd = open_pidfd(pid(rank));
  if (fd < 0) return pid(rank) != 0 && kill(pid(rank), 0) != 0 && errno == ESRCH;
  pollfd query{fd, POLLIN, 0};
  return poll(&query, 1, 0) == 1 && (query.revents & POLLIN) != 0;
}

Segment::Segment(const std::string& name, int rank, int size, size_t bytes, double timeout_s, const WaitPolicy& policy)
    : spins(policy.spin ? kMaxSpins : 0),
      interrupted(policy.interrupted),
      name_(name),
      rank_(rank),
      size_(size),
      bytes_(sizeof(Header) + bytes),
      pidfds_(size, -1) {
  const double deadline_s = now_s() + timeout_s;
  const int flags = rank == 0 ? O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC : O_RDWR | O_CLOEXEC;
  File file{shm_open(name.c_str(), flags, 0600)};
  while (file.fd < 0 && errno == ENOENT && now_s() < deadline_s) {
    std::this_thread::sleep_for(kLongSleep);
    file.fd = shm_open(name.c_str(), flags, 0600);
  }
  if (file.fd < 0 && errno == ENOENT) throw TimedOut("rank 0 has not made shared memory " + name + " in time");
  if (file.fd < 0) fail("shared memory " + name);
  try {
    map(file.fd, rank == 0, deadline_s);
    join(deadline_s);
  } catch (...) {
    shm_unlink(name.c_str());
    release();
    throw;
  }
}

Segment::~Segment() {
  leave();
  release();
}

void Segment::release() {
  if (header_ != nullptr) munmap(header_, bytes_);
  header_ = nullptr;
  for (const int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

void Segment::map(int fd, bool create, double deadline_s) {
  if (create && (errno = allocate(fd, bytes_)) != 0) fail("shared memory " + name_);
  struct stat info {};
  while (fstat(fd, &info) == 0 && info.st_size == 0 && now_s() < deadline_s) std::this_thread::sleep_for(kLongSleep);
  if (info.st_size == 0) throw TimedOut("rank 0 has not sized shared memory " + name_ + " in time");
  if (info.st_uid != geteuid() || static_cast<size_t>(info.st_size) != bytes_) {
    throw std::invalid_argument("shared memory " + name_ + " was made by another user or with other sizes");
  }
  void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) fail("shared memory " + name_);
  header_ = static_cast<Header*>(address);
  if (create) {
    header_->bytes = bytes_;
    header_->size = size_;
    store(header_->magic, kMagic);
  }
}

void Segment::join(double deadline_s) {
  while (load(header_->magic) != kMagic && now_s() < deadline_s) std::this_thread::sleep_for(kLongSleep);
  if (load(header_->magic) != kMagic) throw TimedOut("rank 0 has not finished shared memory " + name_ + " in time");
  if (header_->size != size_) throw std::invalid_argument("the ranks disagree on the size of the group");
  if (!compare_exchange(header_->ranks[rank_].pid, 0, static_cast<int32_t>(getpid()))) {
    throw std::invalid_argument("rank " + std::to_string(rank_) + " is there already");
  }
  if (std::atomic_ref<int32_t>(header_->joined).fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    shm_unlink(name_.c_str());
  }
  double next_check_s = now_s() + kCheckIntervalS;
  while (load(header_->joined) < size_) {
    std::this_thread::sleep_for(kLongSleep);
    if (now_s() < next_check_s) continue;
    next_check_s = now_s() + kCheckIntervalS;
    if (interrupted != nullptr && interrupted()) throw Interrupted();
    for (int r = 0; r < size_; ++r) {
      if (has_ended(r)) throw PeerLost("rank " + std::to_string(r) + " ended while the group was being formed");
    }
    if (now_s() > deadline_s) {
      throw TimedOut("only " + std::to_string(load(header_->joined)) + " of " + std::to_string(size_) +
                     " ranks came to shared memory " + name_ + " in time");
    }
  }
}

std::string Waiter::limit() const {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", timeout_s_);
  return text;
}

// Adapts the spin count: doubled after a wait that ended while spinning, halved after one that did not, since the other
// rank may need this core.
void Waiter::begin() {
  unsigned& spins = segment_.spins;
  if (began_s_ != 0) spins = std::min(spins, std::max(spins / 2, kMinSpins));
  if (began_s_ == 0 && polls_ != 0) spins = std::min(2 * spins, kMaxSpins);
  began_s_ = 0;
  polls_ = 0;
}

bool Waiter::keep_waiting(int source) {
  if (polls_ < segment_.spins) {
    ++polls_;
    pause();
    return true;
  }
  const double time = now_s();
  if (began_s_ == 0) {
    began_s_ = time;
    next_check_s_ = time + kCheckIntervalS;
  }
  if (should_stop(source, time)) return false;
  if (time - began_s_ < kYieldS) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(time - began_s_ < kNapS ? kShortSleep : kLongSleep);
  }
  return true;
}

bool Waiter::should_stop(int source, double time) {
  source_ = source;
  if (load(segment_.fault()) != 0) return true;
  if (segment_.has_left(source)) {
    reason_ = ll::Reason::kLeft;
  } else if (time - began_s_ > timeout_s_) {
    reason_ = ll::Reason::kTimeout;
  } else if (time > next_check_s_) {
    next_check_s_ = time + kCheckIntervalS;
    if (segment_.has_ended(source)) {
      reason_ = ll::Reason::kEnded;
    } else if (segment_.interrupted != nullptr && segment_.interrupted()) {
      reason_ = ll::Reason::kInterrupted;
    }
  }
  return reason_ != ll::Reason::kNone;
}

}  // namespace swiftspec::host
