// Holds all segments of a store that have a file, from their creation to the removal of the file.
//
// A segment is *retired* when it is written whole and holds no newest version of a row: its ordinal, its part
// of the index's address space, is free for another segment. It is *doomed* when moreover no kept commit
// names it and none of its rows is needed to write the last commit anew. The compactor removes doomed
// segments as soon as no read uses them.
//
// Guarded by the store's mutex (store/store_mutex.h), but for removal_waits().
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "store/compactor_control.h"
#include "store/context.h"
#include "store/manifest.h"
#include "store/segment.h"
#include "store/store_mutex.h"
#include "store/write_queue.h"

namespace tierstore {

class SegmentSet {
 public:
  SegmentSet(const StoreContext& context, CompactorControl& control) : context_(context), control_(control) {}

  const std::map<std::uint32_t, SegmentPtr>& by_number() const { return segments_; }
  // The segment must be there.
  const SegmentPtr& At(std::uint32_t number) const { return segments_.at(number); }

  // Returns a number that no segment of this store has had. Throws FullError when all are used up.
  std::uint32_t TakeNumber();
  std::uint32_t next_number() const { return next_number_; }
  void SkipNumbersBelow(std::uint32_t number) { next_number_ = std::max(next_number_, number); }

  // Notes that a segment file was created: the next Sync syncs the directory, too.
  void NoteCreated() { names_unsynced_ = true; }
  void Add(const SegmentPtr& segment) { segments_[segment->number] = segment; }

  // Counts the segment as `bytes` of the cap from now on.
  void SetReservedBytes(Segment& segment, std::uint64_t bytes);
  std::uint64_t reserved_bytes() const { return reserved_bytes_; }
  // Counts the segment's bytes as released, or not, as Segment::IsReleased now says.
  void UpdateReleased(Segment& segment);
  std::uint64_t released_bytes() const { return released_bytes_; }
  // Notes that the segment is full, and that its last chunks are queued.
  void NoteSealed(Segment& segment);
  bool AnyBeingWritten() const { return being_written_ > 0; }

  // Adds `change` to the commits that name each of the segments.
  void Pin(const std::vector<SegmentExtent>& extents, int change);
  // Call it when a segment has lost its last newest version, or its last chunk has left memory.
  void RetireIfDead(const SegmentPtr& segment);
  // Call it when a segment has got or lost a commit, or lost the rows that it kept.
  void DoomIfUnneeded(const SegmentPtr& segment);

  // Removes the files of doomed segments that no read uses. An error is reported to the queue; the segment's
  // bytes then stay counted.
  void RemoveDoomed(Lock& lock, WriteQueue& queue);
  bool HasDoomed() const { return !doomed_.empty(); }
  // Returns whether a doomed segment waits for a read to let go of it: that read then wakes the compactor.
  // Needs no lock.
  bool removal_waits() const { return removal_waits_; }

  // Makes the segments' files, and the names of new files, durable. When this function throws (IoError,
  // CallEnded), the next Sync completes the work.
  void Sync(Lock& lock, const std::vector<SegmentExtent>& extents);

  // Closes all files.
  void Clear();

 private:
  const StoreContext& context_;
  CompactorControl& control_;
  std::map<std::uint32_t, SegmentPtr> segments_;
  std::uint32_t next_number_ = 1;
  std::uint64_t reserved_bytes_ = 0;  // by all segments
  std::uint64_t released_bytes_ = 0;
  std::size_t being_written_ = 0;
  bool names_unsynced_ = false;             // a segment was created since the directory was synced
  std::vector<SegmentPtr> doomed_;          // to be removed
  std::atomic<bool> removal_waits_{false};  // whether a doomed segment waits for a read
};

}  // namespace tierstore
