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
  std::vector<const TableLocations*> indexes;
};

class Snapshots {
 public:
  Snapshots(const StoreContext& context, StoreState& state, const WriteQueue& queue)
      : context_(context), state_(state), queue_(queue) {}

  // How far the last snapshot may lag behind. When either is reached another one is written.
  struct Lag {
    double sizes;        // times its size were written since
    std::uint64_t part;  // this part of all rows, and of StoreLimits::replay_rows, must be replayed
  };
  // The sizes add 5 % of writes. The rows bound the time of an opening after a crash. At the close a snapshot
  // is worth more, since the next opening gains and no call waits.
  static constexpr Lag kLagAtCommit = {20, 1}, kLagAtClose = {1.5, 8};

  // A snapshot fits the cap, it is large enough to matter, and its `lag` is reached.
  bool IsDue(const Lag& lag) const;
  // The index as it is now, at the current commit.
  Snapshot Capture() const;
  // Releases the lock while it writes.
  void Write(Lock& lock, const Snapshot& snapshot);

  // Notes how many rows an opening has read from footers and records (all rows, or rows after the snapshot),
  // and whether a snapshot could not be read.
  void CountRebuilt(std::uint64_t rows, std::uint64_t bytes) {
    rebuilt_rows_ += rows;
    unsaved_rows_ += rows;
    unsaved_bytes_ += bytes;
  }
  void ForgetRebuilt() { rebuilt_rows_ = unsaved_rows_ = unsaved_bytes_ = 0; }
  void CountFailure() { ++failures_; }

  std::uint64_t failures() const { return failures_; }
  std::uint64_t rebuilt_rows() const { return rebuilt_rows_; }

 private:
  const StoreContext& context_;
  StoreState& state_;
  const WriteQueue& queue_;
  std::uint64_t failures_ = 0, rebuilt_rows_ = 0;
  // Rows that were not in the snapshot at opening, and what had been written when the last one was.
  std::uint64_t unsaved_rows_ = 0, unsaved_bytes_ = 0;
  std::uint64_t marked_puts_ = 0, marked_bytes_ = 0;
};

}  // namespace tierstore
