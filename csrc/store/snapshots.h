// Saves the index (the file INDEX, store/index_snapshot.h) when that is worth its bytes, so that the next
// opening reads only later rows. A store never needs a snapshot: a failure is counted, not thrown.
//
// A commit that finds a snapshot due begins the snapshot and does not wait for its end: a thread walks
// through the index (store/snapshot_walk.h) while calls go on. When the walk has ended, the snapshot waits
// for a commit that holds all rows that the walk found: the last commit, if no row has changed since, or else
// the next commit. Then the thread puts the snapshot in place.
//
// Guarded by the store's mutex (store/store_mutex.h).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <thread>

#include "store/context.h"
#include "store/snapshot_walk.h"
#include "store/state.h"
#include "store/write_queue.h"

namespace tierstore {

class Snapshots {
 public:
  Snapshots(const StoreContext& context, StoreMutex& mutex, StoreState& state, const WriteQueue& queue)
      : context_(context), mutex_(mutex), state_(state), queue_(queue) {}

  // Notes that the commit that is under way holds all rows of now.
  void CommitBegins();
  // Notes that the commit was made, and that none of its rows is superseded yet; or that it failed.
  void CommitEnds(bool made);

  // Ends the walk. Call Join afterwards, without the mutex.
  void Stop();
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  // Saves the index at the close, when that is due. Call it after Join, when the last commit holds all of the
  // index. Releases the lock meanwhile.
  void SaveAtClose(Lock& lock);

  // Notes how many rows an opening has read from footers and records (all rows, or rows after the snapshot),
  // and whether a snapshot could not be read.
  void CountRebuilt(std::uint64_t rows, std::uint64_t bytes) {
    rebuilt_rows_ += rows;
    unsaved_.rows += rows;
    unsaved_.bytes += bytes;
  }
  void ForgetRebuilt() {
    rebuilt_rows_ = 0;
    unsaved_ = {};
  }
  void CountFailure() { ++failures_; }

  std::uint64_t failures() const { return failures_; }
  std::uint64_t rebuilt_rows() const { return rebuilt_rows_; }
  // Return how many snapshots were begun, and put in place.
  std::uint64_t begun() const { return begun_; }
  std::uint64_t saved() const { return saved_; }

 private:
  // How far the last snapshot may lag behind. At either limit another snapshot is written.
  struct Lag {
    double sizes;        // the bytes written since, over the snapshot's size
    std::uint64_t part;  // this part of all rows, and of StoreLimits::replay_rows, must be replayed
  };
  // The sizes add 5 % of writes. The rows bound the time of an opening after a crash. At the close a snapshot
  // is worth more, since the next opening gains.
  static constexpr Lag kLagAtCommit = {20, 1}, kLagAtClose = {1.5, 8};

  // A Mark says how much was written.
  struct Mark {
    std::uint64_t rows = 0, bytes = 0;
  };

  bool IsDue(const Lag& lag) const;
  Mark MarkNow() const { return {state_.rows.puts(), queue_.enqueued_bytes()}; }
  void BeginInThread();
  void Begin();
  void WalkAndInstall(Lock& lock);
  void Serve();
  void End(bool installed);

  const StoreContext& context_;
  StoreMutex& mutex_;
  StoreState& state_;
  const WriteQueue& queue_;

  std::thread thread_;
  std::unique_ptr<SnapshotWalk> walk_;      // of the snapshot under way
  bool walked_ = false;                     // whether the snapshot waits for a commit
  std::uint64_t commit_ = 0, history_ = 0;  // what the snapshot serves; 0: not known yet
  std::condition_variable served_;
  bool committing_ = false;
  bool committed_ = false;  // the commit under way holds all that the walk found
  bool stop_ = false;

  std::uint64_t failures_ = 0, rebuilt_rows_ = 0, begun_ = 0, saved_ = 0;
  Mark unsaved_;       // rows that were not in the snapshot at opening
  Mark at_last_, at_;  // when the last snapshot and the snapshot under way were begun
};

}  // namespace tierstore
