#include "store/snapshots.h"

#include <algorithm>
#include <exception>
#include <new>

#include "io/errors.h"

namespace tierstore {

// Returns whether a snapshot fits the cap, is large enough to matter, and its `lag` is reached.
bool Snapshots::IsDue(const Lag& lag) const {
  std::uint64_t rows = 0, bytes = 0;
  for (const auto& table : state_.rows.tables()) {
    if (table == nullptr) continue;
    const TableLocations& index = table->index;
    if (index.hash().HasOwnOrder()) return false;
    rows += index.size();
    bytes += (index.size() - index.dense_rows()) * 11 + index.ranges().bytes();
  }
  const Mark now = MarkNow();
  const std::uint64_t written = unsaved_.bytes + now.bytes - at_last_.bytes;
  const std::uint64_t replayed = unsaved_.rows + now.rows - at_last_.rows;
  const std::uint64_t most = std::max(context_.config.limits.replay_rows, rows / 4) / lag.part;
  const bool lags =
      static_cast<double>(written) >= lag.sizes * static_cast<double>(bytes) || replayed >= most;
  return rows >= context_.config.snapshot_min_rows && lags && state_.space.Fits(bytes);
}

void Snapshots::CommitBegins() {
  committing_ = true;
  committed_ = walked_;
}

void Snapshots::CommitEnds(bool made) {
  committing_ = false;
  if (!made) return;
  if (walk_ == nullptr) {
    if (!stop_ && IsDue(kLagAtCommit)) BeginInThread();
  } else if (walked_ && commit_ == 0 && (committed_ || !state_.rows.changed())) {
    Serve();
  }
}

void Snapshots::BeginInThread() try {
  Join();  // the thread before has ended its work
  Begin();
  thread_ = std::thread([this] {
    Lock lock(mutex_);
    WalkAndInstall(lock);
  });
} catch (const std::exception&) {  // no memory, or no thread
  ++failures_;
  End(false);
}

void Snapshots::Begin() {
  ++begun_;
  at_ = MarkNow();
  walk_ = std::make_unique<SnapshotWalk>(context_, mutex_, state_);
  state_.space.SetFileBytes(MetaFile::kSnapshotTemporary, walk_->bytes());
}

void Snapshots::WalkAndInstall(Lock& lock) {
  bool installed = false, failed = false;
  try {
    walk_->Run(lock);
    walked_ = true;
    state_.space.SetFileBytes(MetaFile::kSnapshotTemporary, walk_->bytes());
    if (!committing_ && !state_.rows.changed()) Serve();
    served_.wait(lock, [this] { return stop_ || commit_ != 0; });
    if (commit_ != 0) {
      const std::uint64_t commit = commit_, history = history_;
      std::uint64_t bytes = 0;
      {
        const Unlocked unlocked(lock);
        bytes = walk_->Install(commit, history);
      }
      state_.space.Overwritten(MetaFile::kSnapshot, bytes);
      installed = true;
    }
  } catch (const Interrupted&) {
  } catch (const std::exception&) {
    failed = true;
  }
  if (!installed) {
    const Unlocked unlocked(lock);
    try {
      context_.env.Remove(context_.PathOf(kSnapshotTemporaryName));
    } catch (const IoError&) {
      // The next opening removes it.
    }
  }
  if (failed) ++failures_;
  End(installed);
}

// The current commit holds all rows that the walk found. If compaction has copied rows since, which no commit
// names, the snapshot waits for the next commit.
void Snapshots::Serve() {
  const CommitRecord* const current = state_.commits.Current();
  if (current == nullptr || !walk_->IsWithin(*current)) return;
  commit_ = state_.commits.current_id;
  history_ = state_.commits.current_history;
  served_.notify_all();
}

void Snapshots::End(bool installed) {
  state_.space.SetFileBytes(MetaFile::kSnapshotTemporary, 0);
  walk_.reset();
  walked_ = committed_ = false;
  commit_ = history_ = 0;
  if (!installed) return;
  ++saved_;
  at_last_ = at_;
  unsaved_ = {};
}

void Snapshots::Stop() {
  stop_ = true;
  if (walk_ != nullptr) walk_->Stop();
  served_.notify_all();
}

void Snapshots::SaveAtClose(Lock& lock) try {
  if (!IsDue(kLagAtClose)) return;
  Begin();
  WalkAndInstall(lock);
} catch (const std::bad_alloc&) {
  ++failures_;
}

}  // namespace tierstore
