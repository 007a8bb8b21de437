// Makes commits, drops commits, and writes the last commit anew. Each call replaces the manifest; one call at
// a time does so.
//
// A commit goes in this order, and a crash at any point leaves either the new commit or the commit before it,
// whole: the active segments are flushed to the queue, the segments that hold newest versions are pinned, the
// queue is drained, the segments' files and the names of new ones are synced, the manifest is written to a
// temporary file, synced, renamed and its name synced. The mutex is free from the draining on, so reads and
// (but for calls, which exclude one another) compaction go on.
//
// When a sync, or the manifest's replacement, fails half-way, the device's contents are unknown: from then on
// every commit throws IoError until the store is opened anew. Rows can still be read and written.
//
// *Renewal* lets a store with one kept commit win back space without another commit: the last commit comes to
// name copies instead of the segments that the copies were made from, so that these segments can go. Two
// kinds of rows must be copied for that: newest versions, as ever, and versions that were superseded since
// the commit (Segment::kept). Copies go to segments that hold nothing newer than the commit (Stream
// kOfCommit), since the commit could not name other segments. A segment that the commit names a part of is
// left alone: a copy from it would be taken for newer than rows that were appended to it since. The commit
// stays the same one, with the same rows, whichever of the two manifests a crash leaves.
//
// Guarded by the store's mutex (store/store_mutex.h).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <string>
#include <vector>

#include "store/appender.h"
#include "store/context.h"
#include "store/snapshots.h"
#include "store/state.h"

namespace tierstore {

class Committer {
 public:
  Committer(const StoreContext& context, StoreState& state, Appender& appender, Snapshots& snapshots,
            WriteQueue& queue)
      : context_(context), state_(state), appender_(appender), snapshots_(snapshots), queue_(queue) {}

  // Makes all rows durable and returns the commit's id; drops surplus untagged commits. Throws InputError
  // when the manifest would be too large, IoError, ClosedError, CallEnded, and what the queue has to report;
  // there is no new commit then.
  std::uint64_t Commit(Lock& lock, std::string meta, std::string tag);
  // Forgets a commit that is not the newest. Throws as Commit does, and InputError when the commit is not
  // kept.
  void Drop(Lock& lock, std::uint64_t id);

  // Returns whether the last commit may be renewed: it is kept, and no other change is under way.
  bool CanRenew() const;
  // Writes the last commit anew, while CanRenew. The compactor has flushed the segments that it appends to.
  // Throws as Commit does.
  void Renew(Lock& lock);
  std::uint64_t renewals() const { return renewals_; }

  // Notes that the last commit holds all that is in the store now: no row is superseded since. Commit does so
  // itself; an opening calls this function at its end.
  void BeginInterval();

  // Makes calls that wait for their turn throw ClosedError.
  void Stop() {
    stop_ = true;
    saved_.notify_all();
  }

 private:
  // Holds the exclusive right to change the manifest while it lives; waits for that right.
  class Turn {
   public:
    Turn(Committer& committer, Lock& lock);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Committer& committer_;
  };

  void ThrowIfCommitsFail() const;
  void FlushAll();
  std::vector<CommitRecord> KeptWith(const CommitRecord& record) const;
  std::vector<SegmentExtent> CaptureExtents() const;
  std::vector<SegmentExtent> ExtentsOfLastCommit() const;
  void Sync(Lock& lock, const std::vector<SegmentExtent>& extents);
  void CheckManifest(const std::vector<CommitRecord>& commits, std::uint64_t limit) const;
  void SaveManifest(Lock& lock, std::vector<CommitRecord> commits);

  const StoreContext& context_;
  StoreState& state_;
  Appender& appender_;
  Snapshots& snapshots_;
  WriteQueue& queue_;

  std::condition_variable saved_;
  bool saving_ = false;  // the manifest is being replaced
  bool stop_ = false;
  std::string failure_;  // why no commit can be made any more; "" when commits can
  std::uint64_t renewals_ = 0;
};

}  // namespace tierstore
