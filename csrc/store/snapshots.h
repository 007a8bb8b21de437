// Saves the index (the file INDEX, store/index_snapshot.h) when that is worth its bytes, so that the next
// opening reads only later rows. A store never needs a snapshot: a failure is counted, not thrown.
//
// Guarded by the store's mutex (store/store_mutex.h).
#pragma once

#include <cstdint>
#include <vector>

#include "store/context.h"
#include "store/index_snapshot.h"
#include "store/state.h"
#include "store/write_queue.h"

namespace tierstore {

// The index at one commit. The indexes may not change until the snapshot is written.
struct Snapshot {
  SnapshotHeader header;
  std::vector<const TableIndex*> indexes;
};

class Snapshots {
 public:
  Snapshots(const StoreContext& context, StoreState& state, const WriteQueue& queue)
      : context_(context), state_(state), queue_(queue) {}

  // How many times its size must be written since the last snapshot before a commit writes another: this adds
  // 5 % of writes. At the close a snapshot is worth more, since the next opening gains and no call waits.
  static constexpr double kLagAtCommit = 20, kLagAtClose = 1.5;

  // A snapshot fits the cap, it is large enough to matter, and its `lag` is reached.
  bool IsDue(double lag) const;
  // The index as it is now, at the current commit.
  Snapshot Capture() const;
  // Releases the lock while it writes.
  void Write(Lock& lock, const Snapshot& snapshot);

  // Notes how many rows an opening has read from footers and records (all rows, or rows after the snapshot),
  // and whether a snapshot could not be read.
  void CountRebuilt(std::uint64_t rows, std::uint64_t bytes) {
    rebuilt_rows_ += rows;
    unsaved_bytes_ += bytes;
  }
  void ForgetRebuilt() { rebuilt_rows_ = unsaved_bytes_ = 0; }
  void CountFailure() { ++failures_; }

  std::uint64_t failures() const { return failures_; }
  std::uint64_t rebuilt_rows() const { return rebuilt_rows_; }

 private:
  const StoreContext& context_;
  StoreState& state_;
  const WriteQueue& queue_;
  std::uint64_t failures_ = 0, rebuilt_rows_ = 0;
  std::uint64_t unsaved_bytes_ = 0;  // of rows that were not in the snapshot at opening
  std::uint64_t mark_ = 0;           // bytes that the queue had got when the last one was written
};

}  // namespace tierstore
