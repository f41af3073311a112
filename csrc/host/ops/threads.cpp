#include "host/ops/threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "kernels_host.h"

namespace swiftspec::host {

namespace {

constexpr auto kSpin = std::chrono::microseconds(100);  // then a worker sleeps
constexpr int kPatience = 2000;                         // pauses, then the caller lets others have its core

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// The caller opens a job, everyone takes pieces, the caller closes it and waits for those still inside. A
// worker that wakes up too late finds the door shut, so nobody waits for a sleeper.
class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int workers() const { return static_cast<int>(threads_.size()); }

  void run(int64_t pieces, void (*body)(const void*, int64_t), const void* context) {
    if (pieces < 2 || threads_.empty() || busy_.exchange(true)) {
      for (int64_t i = 0; i < pieces; ++i) body(context, i);
      return;
    }
    pieces_ = pieces, body_ = body, context_ = context;
    next_ = 0;
    door_ = kOpen;
    epoch_.fetch_add(1);
    if (sleepers_ > 0) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
      }  // nobody is between its last look and its sleep
      wake_.notify_all();
    }
    take_pieces();
    door_.fetch_and(~kOpen);
    for (int spins = 0; door_ != 0; ++spins) spins < kPatience ? pause() : std::this_thread::yield();
    busy_ = false;
  }

 private:
  static constexpr int kOpen = 1 << 30;  // the rest of `door_` counts the workers inside

  void take_pieces() {
    for (int64_t i = next_.fetch_add(1); i < pieces_; i = next_.fetch_add(1)) body_(context_, i);
  }

  bool enter() {
    int seen = door_;
    while ((seen & kOpen) != 0) {
      if (door_.compare_exchange_weak(seen, seen + 1)) return true;
    }
    return false;
  }

  void work() {
    uint32_t last = 0;
    while (!ending_) {
      if (enter()) {
        last = epoch_;
        take_pieces();
        door_.fetch_sub(1);
      }
      await_change(last);
      last = epoch_;
    }
  }

  void await_change(uint32_t last) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    while (epoch_ == last) {
      for (int i = 0; i < 64 && epoch_ == last; ++i) pause();
      if (std::chrono::steady_clock::now() < end) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, [&] { return epoch_ != last; });
      --sleepers_;
    }
  }

  std::vector<std::thread> threads_;
  std::atomic<bool> busy_{false}, ending_{false};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> door_{0}, sleepers_{0};
  std::atomic<int64_t> next_{0};
  int64_t pieces_ = 0;
  void (*body_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
};

// The process's threads. A forked child has none of them: it forgets the pool, whose memory is lost, and
// works alone.
struct Process {
  std::unique_ptr<Pool> pool;

  Process() {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { static_cast<void>(process().pool.release()); });
#endif
  }

  static Process& process() {
    static Process here;
    return here;
  }
};

}  // namespace

void set_threads(int count) {
  std::unique_ptr<Pool>& pool = Process::process().pool;
  if (count == threads()) return;
  pool.reset();
  if (count > 1) pool = std::make_unique<Pool>(count - 1);
}

int threads() {
  const Pool* pool = Process::process().pool.get();
  return pool == nullptr ? 1 : pool->workers() + 1;
}

void share(int64_t pieces, void (*body)(const void*, int64_t), const void* context) {
  Pool* pool = Process::process().pool.get();
  if (pool != nullptr) return pool->run(pieces, body, context);
  for (int64_t i = 0; i < pieces; ++i) body(context, i);
}

}  // namespace swiftspec::host
