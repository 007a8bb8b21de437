// Carries signals between the other parts of a store and its compactor. So the other parts need not know the
// compactor, which may use them.
//
// Guarded by the store's mutex (store/store_mutex.h).
#pragma once

#include <condition_variable>
#include <cstdint>

#include "common/call_limit.h"
#include "store/segment.h"
#include "store/store_mutex.h"

namespace tierstore {

// The space that a call waits for.
struct CompactionDemand {
  std::uint64_t bytes = 0;            // the call needs this much space
  const RowClass* crowded = nullptr;  // the call needs an ordinal for a segment of this row size
  bool all = false;                   // the call asks for all space that compaction can win
};

class CompactorControl {
 public:
  // Says that there may be work: a segment has lost rows or a commit, or the cap has changed.
  void Wake() {
    signal_ = true;
    work_.notify_one();
  }

  // Makes the demand and waits until `done()` holds, the store closes, or the compactor has scanned the store
  // once more and found nothing to win. Returns whether it found nothing and the store is open. Throws
  // CallEnded. One call demands at a time.
  template <class Done>
  bool Demand(Lock& lock, const CompactionDemand& demand, Done done) {
    const std::uint64_t scans = fruitless_scans_;
    demand_ = demand;
    Wake();
    try {
      WaitInCall(progress_, lock, [&] { return stop_ || fruitless_scans_ > scans || done(); });
    } catch (...) {
      demand_ = {};
      throw;
    }
    demand_ = {};
    return fruitless_scans_ > scans && !stop_;
  }

  // Ends every wait above and below.
  void Stop() {
    stop_ = true;
    work_.notify_all();
    progress_.notify_all();
  }
  bool stopped() const { return stop_; }

  // The functions below are for the compactor.
  const CompactionDemand& demand() const { return demand_; }
  // Begins a scan, which looks at the state after all signals so far.
  void BeginScan() { signal_ = false; }
  void CountFruitlessScan() { ++fruitless_scans_; }
  // Says that space was won, or that a scan has ended.
  void NotifyProgress() { progress_.notify_all(); }
  void WaitForWork(Lock& lock) {
    work_.wait(lock, [this] { return stop_ || signal_; });
  }

 private:
  std::condition_variable work_, progress_;
  bool signal_ = false, stop_ = false;
  CompactionDemand demand_;
  std::uint64_t fruitless_scans_ = 0;  // times that the compactor found nothing to win
};

}  // namespace tierstore
