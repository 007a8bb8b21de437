#include "store/segment_set.h"

#include <utility>

#include "common/call_limit.h"
#include "store/errors.h"

namespace tierstore {

std::uint32_t SegmentSet::TakeNumber() {
  if (next_number_ == ~std::uint32_t{0}) {
    throw FullError(
        context_.directory +
        ": the numbers of segments are used up; export the store and import the export into a new store");
  }
  return next_number_++;
}

void SegmentSet::SetReservedBytes(Segment& segment, std::uint64_t bytes) {
  reserved_bytes_ -= segment.reserved_bytes;
  segment.reserved_bytes = bytes;
  reserved_bytes_ += bytes;
}

void SegmentSet::UpdateReleased(Segment& segment) {
  released_bytes_ -= segment.released_bytes;
  segment.released_bytes = segment.IsReleased() ? segment.reserved_bytes : 0;
  released_bytes_ += segment.released_bytes;
}

void SegmentSet::NoteSealed(Segment& segment) {
  segment.sealed = segment.being_written = true;
  ++being_written_;
}

void SegmentSet::Pin(const std::vector<SegmentExtent>& extents, int change) {
  for (const SegmentExtent& extent : extents) {
    const SegmentPtr& segment = segments_.at(extent.number);
    segment->pins += static_cast<std::uint32_t>(change);
    DoomIfUnneeded(segment);
  }
  if (change < 0) control_.Wake();
}

void SegmentSet::RetireIfDead(const SegmentPtr& held) {
  const SegmentPtr segment = held;  // `held` may be the class's own pointer, which is cleared
  if (!segment->sealed || !segment->chunks.empty()) return;
  if (std::exchange(segment->being_written, false)) --being_written_;
  if (segment->retired) return;
  control_.Wake();
  if (segment->live > 0) return;
  segment->Retire();
  segment->row_class->RemoveSegment(*segment);
  DoomIfUnneeded(segment);
}

void SegmentSet::DoomIfUnneeded(const SegmentPtr& segment) {
  UpdateReleased(*segment);
  if (!segment->retired || segment->pins > 0 || segment->kept > 0 || segment->doomed) return;
  segment->doomed = true;
  doomed_.push_back(segment);
  control_.Wake();
}

void SegmentSet::RemoveDoomed(Lock& lock, WriteQueue& queue) {
  constexpr int kOwnReferences = 2;   // of segments_ and of this function
  std::vector<SegmentPtr> read;       // a read opens its files when it comes to them
  removal_waits_ = !doomed_.empty();  // before the references are counted, so that no read's end is missed
  while (!doomed_.empty()) {
    const SegmentPtr segment = doomed_.back();
    doomed_.pop_back();
    if (segment.use_count() > kOwnReferences) {
      read.push_back(segment);
      continue;
    }
    std::exception_ptr error;
    try {
      const Unlocked unlocked(lock);
      context_.env.Remove(segment->path);
    } catch (...) {
      error = std::current_exception();
    }
    if (error != nullptr) {
      queue.Report(error);
      continue;
    }
    reserved_bytes_ -= segment->reserved_bytes;
    segments_.erase(segment->number);
    control_.NotifyProgress();
  }
  removal_waits_ = !read.empty();
  doomed_.insert(doomed_.end(), read.begin(), read.end());
}

void SegmentSet::Sync(Lock& lock, const std::vector<SegmentExtent>& extents) {
  std::vector<SegmentPtr> unsynced;
  for (const SegmentExtent& extent : extents) {
    const SegmentPtr& segment = segments_.at(extent.number);
    if (std::exchange(segment->unsynced, false)) unsynced.push_back(segment);
  }
  const bool names = std::exchange(names_unsynced_, false);
  std::size_t synced = 0;
  try {
    const Unlocked unlocked(lock);
    for (; synced < unsynced.size(); ++synced) {
      CheckCall();
      unsynced[synced]->file->Sync();
    }
    if (names) context_.env.SyncDirectory(context_.directory);
  } catch (...) {
    for (; synced < unsynced.size(); ++synced) unsynced[synced]->unsynced = true;
    names_unsynced_ = names_unsynced_ || names;
    throw;
  }
}

void SegmentSet::Clear() {
  for (auto& [number, segment] : segments_) segment->file.reset();
  segments_.clear();
  doomed_.clear();
}

}  // namespace tierstore
