// The mutex of a store. Each store has one, which `Store` owns and which guards the state of all its parts.
//
// A function of a part (CommitLog, SegmentSet, RowIndex, Space, CompactorControl, WriteQueue, Appender,
// Snapshots, Committer, VictimPicker, Recovery) is called with this mutex held. A function that takes a
// `Lock&` may release the mutex for a while: the state of the store may have changed when the function
// returns or throws, but the mutex is held again. The mutex is never held during IO, except while a store is
// opened, and while a segment file is created or cut off.
#pragma once

#include <atomic>
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

// A mutex that prefers reads to work that takes it again and again.
class StoreMutex : public std::mutex {
 public:
  // Takes the mutex for a read.
  Lock LockForRead() {
    ++reads_waiting_;
    Lock lock(*this);
    --reads_waiting_;
    return lock;
  }
  // Takes the mutex after the reads that wait for it. Without this the caller would have the mutex again
  // before the reads have woken up.
  void LockAfterReads(Lock& lock) {
    for (int i = 0; reads_waiting_ > 0 && i < kYields; ++i) std::this_thread::yield();
    lock.lock();
  }
  // Lets reads that wait for the mutex go first.
  void GiveWay(Lock& lock) {
    if (reads_waiting_ == 0) return;
    lock.unlock();
    LockAfterReads(lock);
  }

 private:
  static constexpr int kYields = 64;  // the mutex is taken after this many
  std::atomic<int> reads_waiting_{0};
};

}  // namespace tierstore
