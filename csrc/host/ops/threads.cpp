#include "host/ops/threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "host/pause.h"
#include "kernels_host.h"

namespace swiftspec::host {

namespace {

constexpr auto kSpin = std::chrono::microseconds(100);  // then a worker sleeps
constexpr int kSpinsBeforeYield = 2000;                 // then the caller yields its core

// The caller opens the gate of a job, all threads take tasks, the caller closes the gate and waits for the workers that
// are still inside. A worker that wakes up late finds the gate closed, so the caller never waits for a sleeping one.
class ThreadPool {
 public:
  explicit ThreadPool(int workers) {
    threads_.reserve(workers);
    try {
      for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { worker_loop(); });
    } catch (const std::system_error&) {
    }  // a limit on threads: the pool has fewer; a joinable thread that is destroyed would end the process
  }

  ~ThreadPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int workers() const { return static_cast<int>(threads_.size()); }

  void run(int64_t tasks, void (*body)(const void*, int64_t), const void* context) {
    if (tasks < 2 || threads_.empty() || busy_.exchange(true)) {
      for (int64_t i = 0; i < tasks; ++i) body(context, i);
      return;
    }
    tasks_ = tasks, body_ = body, context_ = context;
    next_ = 0;
    gate_ = kOpen;
    epoch_.fetch_add(1);
    if (num_sleeping_ > 0) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
      }  // taken so that no worker is between its last check and its sleep
      wake_.notify_all();
    }
    run_tasks();
    gate_.fetch_and(~kOpen);
    for (int spins = 0; gate_ != 0; ++spins) spins < kSpinsBeforeYield ? pause() : std::this_thread::yield();
    busy_ = false;
  }

 private:
  static constexpr int kOpen = 1 << 30;  // the lower bits of `gate_` count the workers inside

  void run_tasks() {
    for (int64_t i = next_.fetch_add(1); i < tasks_; i = next_.fetch_add(1)) body_(context_, i);
  }

  bool try_enter() {
    int gate = gate_;
    while ((gate & kOpen) != 0) {
      if (gate_.compare_exchange_weak(gate, gate + 1)) return true;
    }
    return false;
  }

  void worker_loop() {
    uint32_t last = 0;
    while (!stopping_) {
      if (try_enter()) {
        last = epoch_;
        run_tasks();
        gate_.fetch_sub(1);
      }
      wait_for_job(last);
      last = epoch_;
    }
  }

  void wait_for_job(uint32_t last) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    while (epoch_ == last) {
      for (int i = 0; i < 64 && epoch_ == last; ++i) pause();
      if (std::chrono::steady_clock::now() < end) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      ++num_sleeping_;
      wake_.wait(lock, [&] { return epoch_ != last; });
      --num_sleeping_;
    }
  }

  std::vector<std::thread> threads_;
  std::atomic<bool> busy_{false}, stopping_{false};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> gate_{0}, num_sleeping_{0};
  std::atomic<int64_t> next_{0};
  int64_t tasks_ = 0;
  void (*body_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
};

// The pool of the process. It is never destroyed, since a thread of the interpreter may still run a loop when the process
// exits. A forked child has no worker threads: it abandons the pool, whose memory leaks, and runs
// everything on one thread.
struct Process {
  std::unique_ptr<ThreadPool> pool;

  Process() {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { static_cast<void>(process().pool.release()); });
#endif
  }

  static Process& process() {
    static Process* const instance = new Process;
    return *instance;
  }
};

}  // namespace

void set_threads(int count) {
  std::unique_ptr<ThreadPool>& pool = Process::process().pool;
  if (count == threads()) return;
  pool.reset();
  if (count > 1) pool = std::make_unique<ThreadPool>(count - 1);
}

int threads() {
  const ThreadPool* pool = Process::process().pool.get();
  return pool == nullptr ? 1 : pool->workers() + 1;
}

void parallel_for(int64_t tasks, void (*body)(const void*, int64_t), const void* context) {
  ThreadPool* pool = Process::process().pool.get();
  if (pool != nullptr) return pool->run(tasks, body, context);
  for (int64_t i = 0; i < tasks; ++i) body(context, i);
}

}  // namespace swiftspec::host
