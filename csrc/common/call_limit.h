// Ends calls half-way: a caller sets a limit, and the loops and waits within the call check the limit. Code
// that runs without a limit, as background threads do, is never interrupted.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace tierstore {

// A call that has met its limit throws CallEnded. The class is no std::exception, so that no handler takes
// the end of a call for a failure.
struct CallEnded {};

class CallLimit {
 public:
  using Clock = std::chrono::steady_clock;

  CallLimit() = default;
  explicit CallLimit(Clock::duration time) : deadline_(Clock::now() + time), timed_(true) {}

  // Any thread may call it.
  void End() { ended_ = true; }
  bool IsMet() const { return ended_ || (timed_ && Clock::now() >= deadline_); }

 private:
  std::atomic<bool> ended_{false};
  Clock::time_point deadline_{};
  bool timed_ = false;
};

// Sets the limit of this thread's calls while the scope lives.
class LimitedScope {
 public:
  explicit LimitedScope(const CallLimit& limit) : outer_(current_) { current_ = &limit; }
  ~LimitedScope() { current_ = outer_; }
  LimitedScope(const LimitedScope&) = delete;
  LimitedScope& operator=(const LimitedScope&) = delete;

  static const CallLimit* current() { return current_; }

 private:
  static inline thread_local const CallLimit* current_ = nullptr;
  const CallLimit* const outer_;
};

inline constexpr std::chrono::milliseconds kBetweenLimitChecks{20};

inline bool CallMustEnd() {
  const CallLimit* const limit = LimitedScope::current();
  return limit != nullptr && limit->IsMet();
}

inline void CheckCall() {
  if (CallMustEnd()) throw CallEnded{};
}

// Waits until `done`, or throws CallEnded with the lock held.
template <typename Lock, typename Done>
void WaitInCall(std::condition_variable& changed, Lock& lock, Done done) {
  if (LimitedScope::current() == nullptr) {
    changed.wait(lock, done);
    return;
  }
  while (!changed.wait_for(lock, kBetweenLimitChecks, done)) CheckCall();
}

inline std::unique_lock<std::timed_mutex> LockInCall(std::timed_mutex& mutex) {
  if (LimitedScope::current() == nullptr) return std::unique_lock(mutex);
  std::unique_lock lock(mutex, std::try_to_lock);
  while (!lock.owns_lock() && !lock.try_lock_for(kBetweenLimitChecks)) CheckCall();
  return lock;
}

}  // namespace tierstore
