// The last commit, written anew: it names copies instead of the segments that they were made from, so that
// these can go before there is another commit.
//
// Two kinds of rows must be copied for that: newest versions, as ever, and those that were superseded since
// the commit (Segment::kept). Copies go to segments that hold nothing newer than the commit (Stream
// kOfCommit), or it could not name them. A segment that the commit names a part of is left alone: a copy from
// it would be taken for newer than rows that were appended to it since.
//
// The commit stays the same one, with the same rows, whichever of the two manifests a crash leaves.
#include <algorithm>

#include "common/call_limit.h"
#include "store/errors.h"
#include "store/store.h"

namespace tierstore {

Store::Saving::Saving(Store& store, Lock& lock) : store_(store) {
  WaitInCall(store_.saved_, lock, [this] { return store_.stop_ || !store_.saving_; });
  if (store_.saving_) throw ClosedError("the store is closed");
  store_.saving_ = true;
}

Store::Saving::~Saving() {
  store_.saving_ = false;
  store_.saved_.notify_all();
}

// The last commit holds all that is in the store now: no row is superseded since.
void Store::BeginInterval() {
  for (auto& [row_bytes, row_class] : classes_) {
    SegmentPtr& copies = row_class->active[kOfCommit];
    SegmentPtr& newer = row_class->active[kSinceCommit];
    if (copies != nullptr || newer == nullptr) continue;
    newer->stream = kOfCommit;
    copies.swap(newer);
  }
  for (const auto& [number, segment] : segments_) {
    segment->in_last_commit = false;
    segment->older = true;
    // What compaction copied while the commit was made is in it, too: it was the newest version all along.
    segment->committed_slots = segment->relocated ? segment->slots : segment->durable_slots;
    segment->kept = 0;
    DoomIfUnneeded(segment);
  }
  for (const CommitRecord& commit : commits_) {
    if (commit.id != current_commit_) continue;
    for (const SegmentExtent& extent : commit.segments) segments_.at(extent.number)->in_last_commit = true;
  }
}

bool Store::CanRenew() const {
  const auto is_last = [this](const CommitRecord& commit) { return commit.id == current_commit_; };
  return !saving_ && commit_failure_.empty() && std::any_of(commits_.begin(), commits_.end(), is_last);
}

// Nothing but the last commit names the segment, and that needs nothing of it.
bool Store::IsReleased(const Segment& segment) const {
  return segment.retired && segment.kept == 0 && segment.pins == 1 && segment.in_last_commit;
}

// Once its needed rows are copied the segment can go, without another commit.
bool Store::MayRelease(const Segment& segment) const {
  if (segment.pins == 0) return true;
  const bool whole = segment.relocated || segment.committed_slots == segment.slots;
  return segment.pins == 1 && segment.in_last_commit && whole && CanRenew();
}

std::vector<SegmentExtent> Store::ExtentsOfLastCommit() const {
  std::vector<SegmentExtent> extents;
  for (const auto& [number, segment] : segments_) {
    const std::uint32_t slots = std::min(segment->CommittedSlots(), segment->durable_slots);
    if (slots > 0 && segment->Needed() > 0) extents.push_back({number, slots, !segment->sealed});
  }
  return extents;
}

// Only the compactor may call this: it alone appends to the segments that are flushed.
void Store::RenewCommit(Lock& lock) {
  const Saving saving(*this, lock);
  // What is left unfilled so that a block ends there must be won first next time, or renewing and compacting
  // could go on for ever.
  gained_bytes_ = -static_cast<std::int64_t>(kBlockBytes);
  for (auto& [row_bytes, row_class] : classes_) {
    for (const Stream stream : {kOfCommit, kSinceCommit}) {
      const SegmentPtr segment = row_class->active[stream];
      if (segment == nullptr) continue;
      const std::uint32_t slots = segment->slots;
      Flush(segment);
      gained_bytes_ -= static_cast<std::int64_t>(row_class->BytesOf(segment->slots - slots));
    }
  }
  std::vector<CommitRecord> commits = commits_;
  const auto last = std::find_if(commits.begin(), commits.end(),
                                 [this](const CommitRecord& commit) { return commit.id == current_commit_; });
  const std::vector<SegmentExtent> before = std::exchange(last->segments, ExtentsOfLastCommit()),
                                   after = last->segments;
  Pin(after, 1);
  try {
    queue_.Drain(lock);
    SyncSegments(lock, after);
    SaveManifest(lock, std::move(commits));
  } catch (...) {
    if (commit_failure_.empty()) Pin(after, -1);
    throw;
  }
  for (const SegmentExtent& extent : before) segments_.at(extent.number)->in_last_commit = false;
  for (const SegmentExtent& extent : after) segments_.at(extent.number)->in_last_commit = true;
  Pin(before, -1);
  ++renewed_commits_;
}

}  // namespace tierstore
