#include "common/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/float_mode.h"

namespace tierstore {
namespace {

using Body = std::function<void(std::int64_t, std::int64_t)>;

// A loop lives on its caller's stack, so a worker uses the loop only while `active` counts that worker.
struct Loop {
  Loop(const Body* body, std::int64_t begin, std::int64_t end, std::int64_t grain, int max_helpers)
      : body(body), end(end), grain(grain), max_helpers(max_helpers), next(begin) {}

  const Body* body;
  std::int64_t end;
  std::int64_t grain;
  int max_helpers;
  FloatMode float_mode = CurrentFloatMode();  // the caller's
  std::atomic<std::int64_t> next;
  // Guarded by ThreadPool::mutex_.
  int active = 0;
  std::exception_ptr error;
  std::condition_variable idle;

  bool Exhausted() const { return next.load(std::memory_order_relaxed) >= end; }
};

class ThreadPool {
 public:
  void Run(Loop& loop) {
    const std::int64_t pieces = (loop.end - loop.next.load() + loop.grain - 1) / loop.grain;
    const int helpers = static_cast<int>(std::min<std::int64_t>(loop.max_helpers, pieces - 1));
    {
      std::lock_guard lock(mutex_);
      StartUpTo(loop.max_helpers);
      loops_.push_back(&loop);
    }
    for (int i = 0; i < helpers; ++i) work_.notify_one();
    Work(loop);
    std::unique_lock lock(mutex_);
    loops_.erase(std::find(loops_.begin(), loops_.end(), &loop));
    loop.idle.wait(lock, [&] { return loop.active == 0; });
    if (loop.error) std::rethrow_exception(loop.error);
  }

  void Start(int workers) {
    std::lock_guard lock(mutex_);
    StartUpTo(workers);
  }

 private:
  // With mutex_.
  void StartUpTo(int workers) {
    while (started_ < workers) {
      std::thread([this] { Serve(); }).detach();
      ++started_;
    }
  }

  void Serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Loop* loop = nullptr;
      work_.wait(lock, [&] { return (loop = LeastServed()) != nullptr; });
      ++loop->active;
      lock.unlock();
      {
        const ScopedFloatMode mode(loop->float_mode);
        Work(*loop);
      }
      lock.lock();
      if (--loop->active == 0) loop->idle.notify_all();
    }
  }

  Loop* LeastServed() {
    Loop* best = nullptr;
    for (Loop* loop : loops_) {
      if (loop->active >= loop->max_helpers || loop->Exhausted()) continue;
      if (best == nullptr || loop->active < best->active) best = loop;
    }
    return best;
  }

  void Work(Loop& loop) {
    try {
      for (;;) {
        const std::int64_t begin = loop.next.fetch_add(loop.grain, std::memory_order_relaxed);
        if (begin >= loop.end) return;
        (*loop.body)(begin, std::min(begin + loop.grain, loop.end));
      }
    } catch (...) {
      loop.next.store(loop.end, std::memory_order_relaxed);
      std::lock_guard lock(mutex_);
      if (!loop.error) loop.error = std::current_exception();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  // Guarded by mutex_.
  std::vector<Loop*> loops_;
  int started_ = 0;
};

std::atomic<ThreadPool*> g_pool{nullptr};

// The pool is never destroyed, since its detached workers may outlive static destructors. A forked child has
// none of the workers and perhaps a locked mutex, so the child forgets the pool and makes a pool of its own.
ThreadPool& Pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); });
  static_cast<void>(registered);
  ThreadPool* pool = g_pool.load();
  if (pool == nullptr) {
    auto* fresh = new ThreadPool;
    if (g_pool.compare_exchange_strong(pool, fresh)) {
      pool = fresh;
    } else {
      delete fresh;
    }
  }
  return *pool;
}

int DefaultThreads() {
  cpu_set_t set;
  const int cpus = sched_getaffinity(0, sizeof set, &set) == 0
                       ? CPU_COUNT(&set)
                       : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(cpus, 1, 16);
}

std::atomic<int>& ThreadCount() {
  static std::atomic<int> count{DefaultThreads()};
  return count;
}

}  // namespace

int NumThreads() { return ThreadCount().load(); }

void SetNumThreads(int n) {
  if (n < 1 || n > 1024) throw std::invalid_argument("number of threads must be between 1 and 1024");
  if (ThreadPool* pool = g_pool.load())
    pool->Start(n - 1);  // the next loop may be of a thread that gives way
  ThreadCount().store(n);
}

void StartThreads() { Pool().Start(NumThreads() - 1); }

void ParallelFor(std::int64_t begin, std::int64_t end, std::int64_t grain, const Body& fn) {
  if (begin >= end) return;
  if (grain < 1) throw std::invalid_argument("grain must be positive");
  const int threads = NumThreads();
  if (threads == 1 || end - begin <= grain) {
    for (std::int64_t b = begin; b < end; b += grain) fn(b, std::min(b + grain, end));
    return;
  }
  Loop loop(&fn, begin, end, grain, threads - 1);
  Pool().Run(loop);
}

}  // namespace tierstore
