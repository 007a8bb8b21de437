// The mutex of a store. Each store has one, which `Store` owns and which guards the state of all its parts.
//
// A function of a part (CommitLog, SegmentSet, RowIndex, Space, CompactorControl, WriteQueue, Appender,
// Snapshots, Committer, VictimPicker, Recovery) is called with this mutex held. A function that takes a
// `Lock&` may release the mutex for a while: the state of the store may have changed when the function
// returns or throws, but the mutex is held again. The mutex is never held during IO, except while a store is
// opened, and while a segment file is created or cut off.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace tierstore {

using Lock = std::unique_lock<std::mutex>;

// Frees the mutex while this object lives; an exception that leaves its block is caught with the mutex held
// again.
class Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

// A mutex that prefers reads to work that takes it again and again, and calls to work in the background.
class StoreMutex : public std::mutex {
 public:
  // Takes the mutex for a read.
  Lock LockForRead() {
    const Waiting waiting(reads_waiting_);
    return Lock(*this);
  }
  // Takes the mutex for another call.
  Lock LockForCall() {
    const Waiting waiting(calls_waiting_);
    return Lock(*this);
  }
  // Takes the mutex after the reads that wait for it. With a plain lock the caller would have the mutex again
  // before the reads have woken up.
  void LockAfterReads(Lock& lock) {
    for (int i = 0; reads_waiting_ > 0 && i < kYields; ++i) std::this_thread::yield();
    const Waiting waiting(calls_waiting_);
    lock.lock();
  }
  // Takes the mutex after all reads and calls that wait for it.
  void LockAfterAll(Lock& lock) {
    for (int i = 0; reads_waiting_ + calls_waiting_ > 0 && i < kNaps; ++i) std::this_thread::sleep_for(kNap);
    lock.lock();
  }
  // Lets reads that wait for the mutex go first.
  void GiveWay(Lock& lock) {
    if (reads_waiting_ == 0) return;
    lock.unlock();
    LockAfterReads(lock);
  }

 private:
  // Counts a thread that waits.
  class Waiting {
   public:
    explicit Waiting(std::atomic<int>& count) : count_(count) { ++count_; }
    ~Waiting() { --count_; }

   private:
    std::atomic<int>& count_;
  };
  // After this many yields, or naps, the mutex is taken.
  static constexpr int kYields = 64, kNaps = 64;
  static constexpr std::chrono::microseconds kNap{20};
  std::atomic<int> reads_waiting_{0}, calls_waiting_{0};
};

}  // namespace tierstore
