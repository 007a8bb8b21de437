// The compactor is a thread that copies needed rows out of segments that hold few of them, so that the
// segments can go, and that removes segments that nothing needs. When space is short the compactor serves the
// call that waits; otherwise it keeps dead bytes below the tolerated number (Space::TakeSurvey).
//
// A copy changes nothing that a caller sees: Read gives the same bytes before and after. A row that is
// damaged is not copied: its segment stays and is left alone from then on. The write queue gets the error,
// and its next ThrowPending throws that error. The other parts reach the compactor through
// store/compactor_control.h.
//
// The thread takes the store's mutex (store/store_mutex.h), gives way to reads within each batch of rows, and
// holds the mutex in no IO but the creation of a segment. The members are the thread's own.
#pragma once

#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "store/appender.h"
#include "store/committer.h"
#include "store/compactor_control.h"
#include "store/gain.h"
#include "store/state.h"
#include "store/victims.h"

namespace tierstore {

class Compactor {
 public:
  Compactor(StoreMutex& mutex, StoreState& state, Appender& appender, Committer& committer, WriteQueue& queue,
            CompactorControl& control)
      : mutex_(mutex),
        state_(state),
        appender_(appender),
        committer_(committer),
        queue_(queue),
        control_(control),
        victims_(state, committer, control) {}

  void Start() {
    thread_ = std::thread([this] { Run(); });
  }
  // Waits for the end of the thread. Call it after CompactorControl::Stop, without the mutex.
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  // Call it with the mutex held.
  std::uint64_t relocated_rows() const { return relocated_rows_; }

 private:
  struct Batch;

  void Run();
  bool CompactOnce(Lock& lock);
  void RenewCommit(Lock& lock);
  void CompactSegment(Lock& lock, const Victim& victim);
  void ReadVictim(Lock& lock, Segment& victim, std::uint32_t first, std::uint32_t last, std::byte* data);
  void FindNewest(const Batch& batch, std::span<const std::uint32_t> slots, bool* newest) const;
  bool IsKept(const Batch& batch, std::uint32_t slot) const;
  bool IsNeeded(const Batch& batch, std::uint32_t slot) const;
  std::vector<std::uint32_t> FindNeeded(Lock& lock, const Batch& batch);
  void Relocate(Lock& lock, const Batch& batch);
  void Copy(const Batch& batch, const std::uint32_t* slots, const Span& span);

  StoreMutex& mutex_;
  StoreState& state_;
  Appender& appender_;
  Committer& committer_;
  WriteQueue& queue_;
  CompactorControl& control_;
  const VictimPicker victims_;
  GainCount gain_;
  std::uint64_t relocated_rows_ = 0;
  std::thread thread_;
};

}  // namespace tierstore
