#include "common/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/float_mode.h"
#include "common/spin.h"

namespace tierstore {
namespace {

using Body = std::function<void(std::int64_t, std::int64_t)>;

// Returns the number of CPUs that the calling thread may run on.
int Cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                     : static_cast<int>(std::thread::hardware_concurrency());
}

thread_local int t_limit = 0;  // threads of a loop that this thread starts; 0: no limit of its own

std::atomic<int>& ThreadCount() {
  static std::atomic<int> count{std::clamp(Cpus(), 1, 16)};
  return count;
}

// Returns how many ranks of a training share the CPUs, as torchrun says.
int RanksHere() {
  const char* const ranks = std::getenv("LOCAL_WORLD_SIZE");
  return ranks == nullptr ? 1 : std::max(1, std::atoi(ranks));
}

std::atomic<int>& SpinningCount() {
  static std::atomic<int> count{SpinningThreads(Cpus() / RanksHere())};
  return count;
}

bool MaySpin() { return SpinningCount().load(std::memory_order_relaxed) > 0; }

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
  // The workers that help. Only raised with ThreadPool::mutex_; a worker leaves without it, so that the
  // caller need not wait until the worker gets the mutex.
  std::atomic<int> active{0};
  std::exception_ptr error;  // guarded by ThreadPool::mutex_ while there are helpers

  // Returns how many more helpers could get a piece. Once this is 0 because no piece is left, it stays 0.
  int Wanted() const {
    const std::int64_t left = end - next.load(std::memory_order_relaxed);
    if (left <= 0) return 0;
    const std::int64_t seats = max_helpers - active.load(std::memory_order_relaxed);
    return static_cast<int>(std::min((left - 1) / grain + 1, seats));
  }
};

// A worker sleeps, spins or helps; between these it looks for a loop, with the mutex.
//
// Whoever adds a loop wakes one worker, and each worker that looks wakes two more while loops want more
// helpers than are on their way. So a caller pays for one wake-up at most, all workers are awake after a few
// steps, and most stay asleep when the loop is over before. Nobody wakes workers while others spin: these see
// a new loop at once, and the last of them wakes more. No wake-up is lost, since a worker that was spinning
// or woken looks once it is no longer counted as such: it helps, or finds that no loop wants help.
class ThreadPool {
 public:
  void Run(Loop& loop) {
    std::unique_lock lock(mutex_, std::defer_lock);
    Lock(lock);
    StartUpTo(loop.max_helpers);
    loops_.push_back(&loop);
    added_.fetch_add(1, std::memory_order_relaxed);
    const int woken = ChooseSleeping(1, 0);
    lock.unlock();
    Notify(woken);
    Work(loop);
    Lock(lock);
    loops_.erase(std::find(loops_.begin(), loops_.end(), &loop));  // no worker joins from here on
    lock.unlock();
    WaitForHelpers(loop);
    if (loop.error) std::rethrow_exception(loop.error);
  }

  void Start(int workers) {
    std::lock_guard lock(mutex_);
    StartUpTo(workers);
  }

 private:
  // The mutex is held for a fraction of a microsecond, in which a thread that sleeps until it gets the mutex
  // would not even have fallen asleep.
  void Lock(std::unique_lock<std::mutex>& lock) {
    constexpr int kTries = 50;
    for (int i = 0; MaySpin() && i < kTries; ++i) {
      if (lock.try_lock()) return;
      Pause();
    }
    lock.lock();
  }

  // With mutex_.
  void StartUpTo(int workers) {
    while (started_ < workers) {
      std::thread([this] { Serve(); }).detach();
      ++started_;
    }
  }

  void Serve() {
    bool has_helped = false;
    std::unique_lock lock(mutex_);
    for (;;) {
      // Others are woken before this worker joins a loop, whose caller has to wait for those that joined.
      if (const int woken = ChooseSleeping(2, 1); woken > 0) {
        lock.unlock();
        Notify(woken);
        Lock(lock);
      }
      if (Loop* loop = LeastServed()) {
        loop->active.fetch_add(1, std::memory_order_relaxed);
        lock.unlock();
        Help(*loop);
        has_helped = true;
        Lock(lock);
      } else if (!has_helped || !SpinForLoop(lock)) {
        // A worker that came too late to help does not spin: where CPUs are busy, most come too late.
        Sleep(lock);
        has_helped = false;
      }
    }
  }

  void Help(Loop& loop) {
    {
      const ScopedFloatMode mode(loop.float_mode);
      Work(loop);
    }
    if (loop.active.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    // The caller may have returned by now, so the loop may be gone. A caller that sleeps has been counted
    // before it looked at `active` for the last time, with the mutex.
    std::unique_lock lock(mutex_, std::defer_lock);
    Lock(lock);
    const bool is_waited_for = waiting_ > 0;
    lock.unlock();
    if (is_waited_for) idle_.notify_all();
  }

  void WaitForHelpers(const Loop& loop) {
    const auto idle = [&] { return loop.active.load(std::memory_order_acquire) == 0; };
    if (idle() || (MaySpin() && SpinUntil(idle))) return;
    std::unique_lock lock(mutex_);
    ++waiting_;
    idle_.wait(lock, idle);
    --waiting_;
  }

  // With mutex_.
  Loop* LeastServed() {
    Loop* best = nullptr;
    for (Loop* loop : loops_) {
      if (loop->Wanted() > 0 && (best == nullptr || loop->active < best->active)) best = loop;
    }
    return best;
  }

  // With mutex_. Returns how many sleeping workers, `most` or fewer, are to be notified, after the mutex has
  // been released. `looking` is 1 if the calling thread is going to help.
  int ChooseSleeping(int most, int looking) {
    if (sleeping_ == 0 || spinning_ > 0) return 0;
    int wanted = -woken_ - looking;
    for (const Loop* loop : loops_) wanted += loop->Wanted();
    const int chosen = std::clamp(wanted, 0, std::min(most, sleeping_));
    sleeping_ -= chosen;
    woken_ += chosen;
    return chosen;
  }

  void Notify(int workers) {
    for (int i = 0; i < workers; ++i) work_.notify_one();
  }

  // With mutex_, which is released meanwhile. A worker that falls asleep may take the place of one that was
  // woken: no loop wants help, so it does not matter which of the two looks again.
  void Sleep(std::unique_lock<std::mutex>& lock) {
    ++sleeping_;
    work_.wait(lock, [&] { return woken_ > 0; });
    --woken_;
  }

  // With mutex_, which is released meanwhile. Returns whether a loop was added. If not, the worker need not
  // look again: a loop that wants no more helpers never wants one later.
  bool SpinForLoop(std::unique_lock<std::mutex>& lock) {
    if (spinning_ >= SpinningCount().load(std::memory_order_relaxed)) return false;
    const std::uint64_t before = added_.load(std::memory_order_relaxed);
    const auto is_added = [&] { return added_.load(std::memory_order_relaxed) != before; };
    ++spinning_;
    lock.unlock();
    SpinUntil(is_added);
    Lock(lock);
    --spinning_;
    return is_added();
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
  std::condition_variable work_;  // a worker is woken
  std::condition_variable idle_;  // a loop has no helpers
  // Guarded by mutex_.
  std::vector<Loop*> loops_;
  int started_ = 0;
  int sleeping_ = 0;  // workers that sleep and are not woken
  int woken_ = 0;     // workers that sleep and have to wake up
  int spinning_ = 0;
  int waiting_ = 0;  // callers that sleep until their helpers have finished
  // The number of loops so far, raised with mutex_. Spinning workers read it all the time, so it has a cache
  // line of its own.
  alignas(64) std::atomic<std::uint64_t> added_{0};
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

}  // namespace

int NumThreads() {
  const int all = ThreadCount().load();
  return t_limit > 0 ? std::min(t_limit, all) : all;
}

void SetNumThreads(int n) {
  if (n < 1 || n > 1024) throw std::invalid_argument("number of threads must be between 1 and 1024");
  if (ThreadPool* pool = g_pool.load())
    pool->Start(n - 1);  // the next loop may be of a thread that gives way
  ThreadCount().store(n);
}

void LimitThreads(int n) {
  if (n < 0) throw std::invalid_argument("a limit of threads must be 0 (none) or more");
  t_limit = n;
}

int SpinningThreads(int cpus) { return cpus <= 4 ? 0 : cpus / 2; }

void SetSpinningThreads(int n) { SpinningCount().store(n); }

void StartThreads() { Pool().Start(ThreadCount().load() - 1); }

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
