// Commits: what is named by the manifest, kept, and given up again.
#include <algorithm>
#include <chrono>
#include <tuple>
#include <utility>

#include "common/call_limit.h"
#include "io/errors.h"
#include "store/store.h"

namespace tierstore {
namespace {

// Of the largest manifest, what commits leave for renewals of the last one, which may name more segments.
constexpr std::uint64_t kRenewalShare = 16;
// A snapshot is written when so many times its size has been written since the last one: 5 % on top.
constexpr double kSnapshotLag = 20;

// What the kernel could not write it may have dropped, and will not report again.
std::string FailedSync(const std::exception& error) {
  return std::string("an earlier sync failed (") + error.what() + "), so what it was for may be lost";
}

}  // namespace

std::uint64_t Store::Commit(std::string meta, std::string tag) {
  const auto call = BeginCall();
  CheckWritable();
  Lock lock(mutex_);
  const Saving saving(*this, lock);
  queue_.ThrowPending();
  ThrowIfCommitsFail();
  for (auto& [row_bytes, row_class] : classes_) {
    for (SegmentPtr& active : row_class->active) {
      if (active != nullptr) Flush(active);
    }
  }
  const bool snapshot = SnapshotIsDue(kSnapshotLag);
  std::vector<const TableIndex*> indexes;
  SnapshotHeader header;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  CommitRecord record{
      next_commit_,   history_,        std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(),
      std::move(tag), std::move(meta), CaptureExtents()};
  std::vector<CommitRecord> kept = commits_;
  kept.push_back(record);
  if (kept.size() > config_.keep_commits) {
    const auto newest = kept.end() - static_cast<std::ptrdiff_t>(config_.keep_commits);
    const auto named = [](const CommitRecord& commit) { return !commit.tag.empty(); };
    kept.erase(std::stable_partition(kept.begin(), newest, named), newest);
  }
  CheckManifest(kept, config_.limits.manifest_bytes - config_.limits.manifest_bytes / kRenewalShare);
  Pin(record.segments, 1);  // from now on compaction leaves the files in place
  const auto before = std::pair(current_commit_, commit_history_);
  current_commit_ = record.id;
  commit_history_ = history_;
  changed_ = false;
  if (snapshot) {
    header = CaptureSnapshot(indexes);
    compaction_held_ = true;
  }
  try {
    queue_.Drain(lock);
    SyncSegments(lock, record.segments);
    ++next_commit_;
    SaveManifest(lock, std::move(kept));
  } catch (...) {
    if (commit_failure_.empty()) Pin(record.segments, -1);
    std::tie(current_commit_, commit_history_) = before;
    changed_ = true;
    ReleaseCompaction();
    throw;
  }
  meta_ = record.meta;
  BeginInterval();
  if (snapshot) WriteSnapshot(lock, header, indexes);
  ReleaseCompaction();
  return record.id;
}

void Store::ReleaseCompaction() {
  compaction_held_ = false;
  compaction_resumed_.notify_all();
}

std::vector<CommitRecord> Store::Commits() {
  CheckOpen();
  Lock lock(mutex_);
  return commits_;
}

std::string Store::Meta() {
  CheckOpen();
  Lock lock(mutex_);
  return meta_;
}

void Store::DropCommit(std::uint64_t id) {
  const auto call = BeginCall();
  CheckWritable();
  Lock lock(mutex_);
  const Saving saving(*this, lock);
  queue_.ThrowPending();
  ThrowIfCommitsFail();
  std::vector<CommitRecord> kept = commits_;
  std::erase_if(kept, [id](const CommitRecord& commit) { return commit.id == id; });
  if (kept.size() == commits_.size()) throw InputError("commit " + std::to_string(id) + " is not kept");
  if (commits_.back().id == id) {
    throw InputError("commit " + std::to_string(id) + " is the newest; a store keeps at least that one");
  }
  SaveManifest(lock, std::move(kept));
}

// Segments that hold newest versions, with what of them is, or is queued to be, in the file.
std::vector<SegmentExtent> Store::CaptureExtents() {
  std::vector<SegmentExtent> extents;
  for (const auto& [number, segment] : segments_) {
    if (!segment->retired && segment->live > 0)
      extents.push_back({number, segment->durable_slots, !segment->sealed});
  }
  return extents;
}

void Store::SyncSegments(Lock& lock, const std::vector<SegmentExtent>& extents) {
  std::vector<SegmentPtr> unsynced;
  for (const SegmentExtent& extent : extents) {
    const SegmentPtr& segment = segments_.at(extent.number);
    if (std::exchange(segment->unsynced, false)) unsynced.push_back(segment);
  }
  const bool names = std::exchange(names_unsynced_, false);
  std::size_t synced = 0;
  const auto leave_to_next_commit = [&] {
    for (; synced < unsynced.size(); ++synced) unsynced[synced]->unsynced = true;
    names_unsynced_ = names_unsynced_ || names;
  };
  try {
    const Unlocked unlocked(lock);
    for (; synced < unsynced.size(); ++synced) {
      CheckCall();
      unsynced[synced]->file->Sync();
    }
    if (names) env_.SyncDirectory(directory_);
  } catch (const CallEnded&) {
    leave_to_next_commit();
    throw;
  } catch (const IoError& error) {
    leave_to_next_commit();
    if (error.IsOutOfDescriptors()) throw;  // before anything was synced
    commit_failure_ = FailedSync(error);
    throw;
  } catch (const std::exception& error) {
    leave_to_next_commit();
    commit_failure_ = FailedSync(error);
    throw;
  }
}

// What is larger could be written, but not opened.
void Store::CheckManifest(const std::vector<CommitRecord>& commits, std::uint64_t limit) const {
  const std::uint64_t bytes = Manifest{store_id_, next_commit_, next_segment_, commits}.EncodedBytes();
  if (bytes <= limit) return;
  throw InputError(
      directory_ + ": the kept commits with their metas and tags would take " + std::to_string(bytes) +
      " bytes of the manifest, which has room for " + std::to_string(limit) +
      "; give this commit a smaller meta, or drop commits that have a tag. Nothing is lost: commit "
      "again");
}

// Replaces the kept commits, in memory once the file is durable.
void Store::SaveManifest(Lock& lock, std::vector<CommitRecord> commits) {
  CheckManifest(commits, config_.limits.manifest_bytes);
  const Manifest manifest{store_id_, next_commit_, next_segment_, commits};
  std::uint64_t bytes = 0;
  bool begun = false;
  try {
    const Unlocked unlocked(lock);
    bytes = manifest.WriteTemporary(env_, directory_);
    begun = true;
    Manifest::Install(env_, directory_);
  } catch (const std::exception& error) {
    if (begun)
      commit_failure_ = std::string("the last one may or may not be in force (") + error.what() + ")";
    throw;
  }
  manifest_bytes_ = bytes;
  manifest_bytes_written_ += bytes;
  commits_.swap(commits);
  for (const CommitRecord& old : commits) {
    const auto same = [&](const CommitRecord& commit) { return commit.id == old.id; };
    if (std::none_of(commits_.begin(), commits_.end(), same)) Pin(old.segments, -1);
  }
}

void Store::ThrowIfCommitsFail() const {
  if (!commit_failure_.empty()) {
    throw IoError(EIO, directory_,
                  "commit: " + commit_failure_ + "; reopen the store to go on from its last commit");
  }
}

void Store::Pin(const std::vector<SegmentExtent>& extents, int change) {
  for (const SegmentExtent& extent : extents) {
    const SegmentPtr& segment = segments_.at(extent.number);
    segment->pins += static_cast<std::uint32_t>(change);
    DoomIfUnneeded(segment);
  }
  if (change < 0) WakeCompactor();
}

// A sealed segment without newest versions leaves the index's address space, and the disk once no commit
// names it.
void Store::RetireIfDead(const SegmentPtr& held) {
  const SegmentPtr segment = held;  // `held` may be the class's own pointer, which is cleared
  if (!segment->sealed || !segment->chunks.empty() || segment->retired) return;
  WakeCompactor();
  if (segment->live > 0) return;
  segment->retired = true;
  segment->row_class->segments[segment->ordinal].reset();
  DoomIfUnneeded(segment);
}

void Store::DoomIfUnneeded(const SegmentPtr& segment) {
  if (!segment->retired || segment->pins > 0 || segment->kept > 0 || segment->doomed) return;
  segment->doomed = true;
  doomed_.push_back(segment);
  WakeCompactor();
}

}  // namespace tierstore
