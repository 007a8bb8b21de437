#include "store/committer.h"

#include <algorithm>
#include <chrono>
#include <tuple>
#include <utility>

#include "common/call_limit.h"
#include "io/errors.h"
#include "store/errors.h"

namespace tierstore {
namespace {

// Commits leave this fraction of the largest manifest for renewals of the last commit, which may name more
// segments.
constexpr std::uint64_t kRenewalShare = 16;

std::int64_t Now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

Committer::Turn::Turn(Committer& committer, Lock& lock) : committer_(committer) {
  WaitInCall(committer.saved_, lock, [&] { return committer.stop_ || !committer.saving_; });
  if (committer.saving_) throw ClosedError("the store is closed");
  committer.saving_ = true;
}

Committer::Turn::~Turn() {
  committer_.saving_ = false;
  committer_.saved_.notify_all();
}

std::uint64_t Committer::Commit(Lock& lock, std::string meta, std::string tag) {
  const Turn turn(*this, lock);
  queue_.ThrowPending();
  ThrowIfCommitsFail();
  CommitLog& commits = state_.commits;
  FlushAll();
  const CommitRecord record{commits.next_id, commits.next_history, Now(),
                            std::move(tag),  std::move(meta),      CaptureExtents()};
  std::vector<CommitRecord> kept = KeptWith(record);
  const std::uint64_t most = context_.config.limits.manifest_bytes;
  CheckManifest(kept, most - most / kRenewalShare);
  state_.segments.Pin(record.segments, 1);  // from now on compaction leaves the files in place
  const auto before = std::pair(commits.current_id, commits.current_history);
  commits.current_id = record.id;
  commits.current_history = record.history;
  state_.rows.MarkCommitted();
  snapshots_.CommitBegins();
  try {
    queue_.Drain(lock);
    Sync(lock, record.segments);
    ++commits.next_id;
    SaveManifest(lock, std::move(kept));
  } catch (...) {
    if (failure_.empty()) state_.segments.Pin(record.segments, -1);
    std::tie(commits.current_id, commits.current_history) = before;
    state_.rows.MarkChanged();
    snapshots_.CommitEnds(false);
    throw;
  }
  commits.meta = record.meta;
  BeginInterval();
  snapshots_.CommitEnds(true);
  return record.id;
}

void Committer::Drop(Lock& lock, std::uint64_t id) {
  const Turn turn(*this, lock);
  queue_.ThrowPending();
  ThrowIfCommitsFail();
  std::vector<CommitRecord> kept = state_.commits.kept;
  if (state_.commits.Find(id) == nullptr) throw InputError("commit " + std::to_string(id) + " is not kept");
  if (kept.back().id == id) {
    throw InputError("commit " + std::to_string(id) +
                     " is the newest, which a store keeps; drop an older commit");
  }
  std::erase_if(kept, [id](const CommitRecord& commit) { return commit.id == id; });
  SaveManifest(lock, std::move(kept));
}

bool Committer::CanRenew() const {
  return !saving_ && failure_.empty() && state_.commits.Current() != nullptr;
}

void Committer::Renew(Lock& lock) {
  const Turn turn(*this, lock);
  std::vector<CommitRecord> commits = state_.commits.kept;
  const auto last = std::find_if(commits.begin(), commits.end(), [this](const CommitRecord& commit) {
    return commit.id == state_.commits.current_id;
  });
  const std::vector<SegmentExtent> before = std::exchange(last->segments, ExtentsOfLastCommit()),
                                   after = last->segments;
  SegmentSet& segments = state_.segments;
  segments.Pin(after, 1);
  try {
    queue_.Drain(lock);
    Sync(lock, after);
    SaveManifest(lock, std::move(commits));
  } catch (...) {
    if (failure_.empty()) segments.Pin(after, -1);
    throw;
  }
  for (const SegmentExtent& extent : before) segments.At(extent.number)->in_last_commit = false;
  for (const SegmentExtent& extent : after) {
    segments.At(extent.number)->in_last_commit = true;
    segments.UpdateReleased(*segments.At(extent.number));
  }
  segments.Pin(before, -1);
  ++renewals_;
}

void Committer::BeginInterval() {
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    SegmentPtr& copies = row_class->active[kOfCommit];
    SegmentPtr& newer = row_class->active[kSinceCommit];
    if (copies != nullptr || newer == nullptr) continue;
    newer->stream = kOfCommit;
    copies.swap(newer);
  }
  for (const auto& [number, segment] : state_.segments.by_number()) {
    segment->in_last_commit = false;
    // Rows that compaction copied while the commit was made are in the commit, too: they were the newest
    // versions all along.
    segment->committed_slots = segment->relocated ? segment->slots : segment->durable_slots;
    segment->BeginInterval();
    state_.segments.DoomIfUnneeded(segment);
  }
  const CommitRecord* const current = state_.commits.Current();
  if (current == nullptr) return;
  for (const SegmentExtent& extent : current->segments) {
    Segment& segment = *state_.segments.At(extent.number);
    segment.in_last_commit = true;
    state_.segments.UpdateReleased(segment);
  }
}

void Committer::ThrowIfCommitsFail() const {
  if (!failure_.empty()) {
    throw IoError(EIO, context_.directory,
                  "commit: " + failure_ + "; reopen the store to go on from its last commit");
  }
}

void Committer::FlushAll() {
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    for (SegmentPtr& active : row_class->active) {
      if (active != nullptr) appender_.Flush(active);
    }
  }
}

// Returns the commits to keep once there is this commit.
std::vector<CommitRecord> Committer::KeptWith(const CommitRecord& record) const {
  std::vector<CommitRecord> kept = state_.commits.kept;
  kept.push_back(record);
  const std::size_t keep = context_.config.keep_commits;
  if (kept.size() > keep) {
    const auto newest = kept.end() - static_cast<std::ptrdiff_t>(keep);
    const auto has_tag = [](const CommitRecord& commit) { return !commit.tag.empty(); };
    kept.erase(std::stable_partition(kept.begin(), newest, has_tag), newest);
  }
  return kept;
}

// Returns the segments that hold newest versions, with the slots that are in their files or are queued.
std::vector<SegmentExtent> Committer::CaptureExtents() const {
  std::vector<SegmentExtent> extents;
  for (const auto& [number, segment] : state_.segments.by_number()) {
    if (!segment->retired && segment->live > 0)
      extents.push_back({number, segment->durable_slots, !segment->sealed});
  }
  return extents;
}

// Returns the extents of the last commit now: the segments that hold its rows, up to the first newer row.
std::vector<SegmentExtent> Committer::ExtentsOfLastCommit() const {
  std::vector<SegmentExtent> extents;
  for (const auto& [number, segment] : state_.segments.by_number()) {
    const std::uint32_t slots = std::min(segment->CommittedSlots(), segment->durable_slots);
    if (slots > 0 && segment->Needed() > 0) extents.push_back({number, slots, !segment->sealed});
  }
  return extents;
}

// A sync that fails may not be repeated: the kernel may have dropped the bytes that it could not write, and
// will not report them again.
void Committer::Sync(Lock& lock, const std::vector<SegmentExtent>& extents) {
  const auto fail = [this](const std::exception& error) {
    failure_ = std::string("an earlier sync failed (") + error.what() +
               "), so the bytes that were to be synced may be lost";
  };
  try {
    state_.segments.Sync(lock, extents);
  } catch (const IoError& error) {
    if (!error.IsOutOfDescriptors()) fail(error);  // without descriptors nothing was synced yet
    throw;
  } catch (const std::exception& error) {
    fail(error);
    throw;
  }
}

// A larger manifest could be written, but not opened.
void Committer::CheckManifest(const std::vector<CommitRecord>& commits, std::uint64_t limit) const {
  const std::uint64_t bytes =
      Manifest{context_.id, state_.commits.next_id, state_.segments.next_number(), commits}.EncodedBytes();
  if (bytes <= limit) return;
  throw InputError(
      context_.directory + ": the kept commits with their metas and tags would take " +
      std::to_string(bytes) + " bytes of the manifest, which has room for " + std::to_string(limit) +
      "; give this commit a smaller meta, or drop commits that have a tag. Nothing is lost: commit "
      "again");
}

// Replaces the kept commits, in memory once the file is durable.
void Committer::SaveManifest(Lock& lock, std::vector<CommitRecord> commits) {
  CheckManifest(commits, context_.config.limits.manifest_bytes);
  const Manifest manifest{context_.id, state_.commits.next_id, state_.segments.next_number(), commits};
  std::uint64_t bytes = 0;
  bool begun = false;
  try {
    const Unlocked unlocked(lock);
    bytes = manifest.WriteTemporary(context_.env, context_.directory);
    begun = true;
    Manifest::Install(context_.env, context_.directory);
  } catch (const std::exception& error) {
    if (begun) failure_ = std::string("the last commit may or may not be in force (") + error.what() + ")";
    throw;
  }
  state_.space.Overwritten(MetaFile::kManifest, bytes);
  state_.commits.kept.swap(commits);
  for (const CommitRecord& old : commits) {
    if (state_.commits.Find(old.id) == nullptr) state_.segments.Pin(old.segments, -1);
  }
}

}  // namespace tierstore
