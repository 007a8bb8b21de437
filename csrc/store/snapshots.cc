#include "store/snapshots.h"

#include <algorithm>

#include "io/errors.h"

namespace tierstore {

bool Snapshots::IsDue(const Lag& lag) const {
  std::uint64_t rows = 0, bytes = 0;
  for (const auto& table : state_.rows.tables()) {
    if (table == nullptr) continue;
    const TableLocations& index = table->index;
    if (index.hash().HasOwnOrder()) return false;
    rows += index.size();
    bytes += index.hash().size() * 11 + index.ranges().bytes();
  }
  const std::uint64_t written = unsaved_bytes_ + queue_.enqueued_bytes() - marked_bytes_;
  const std::uint64_t replayed = unsaved_rows_ + state_.rows.puts() - marked_puts_;
  const std::uint64_t most = std::max(context_.config.limits.replay_rows, rows / 4) / lag.part;
  const bool lags =
      static_cast<double>(written) >= lag.sizes * static_cast<double>(bytes) || replayed >= most;
  return rows >= context_.config.snapshot_min_rows && lags && state_.space.Fits(bytes);
}

Snapshot Snapshots::Capture() const {
  const CommitLog& commits = state_.commits;
  Snapshot snapshot{{context_.id, commits.current_id, commits.current_history, {}, {}}, {}};
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    auto& entry = snapshot.header.classes.emplace_back();
    entry.row_bytes = row_bytes;
    entry.slot_bits = row_class->slot_bits;
    for (const SegmentPtr& segment : row_class->segments) {
      // Also segments without newest versions: later rows in them must not bring old versions back.
      entry.segments.push_back(segment == nullptr
                                   ? SnapshotHeader::Segment{0, 0}
                                   : SnapshotHeader::Segment{segment->number, segment->durable_slots});
    }
  }
  const auto& tables = state_.rows.tables();
  for (std::uint32_t number = 0; number < tables.size(); ++number) {
    const auto& table = tables[number];
    if (table == nullptr) continue;
    const DenseRanges& dense = table->index.ranges();
    std::vector<SnapshotHeader::Range> ranges;
    for (std::size_t i = 0; i < dense.ranges(); ++i)
      ranges.push_back({dense.ArrayOf(i).number, dense.ArrayOf(i).bits});
    snapshot.header.range_bits = dense.range_bits();
    snapshot.header.tables.push_back(
        {number, table->row_class->geometry.row_bytes, table->index.hash().size(), std::move(ranges)});
    snapshot.indexes.push_back(&table->index);
  }
  return snapshot;
}

void Snapshots::Write(Lock& lock, const Snapshot& snapshot) {
  const std::uint64_t marked_bytes = queue_.enqueued_bytes(), marked_puts = state_.rows.puts();
  std::uint64_t bytes = 0;
  try {
    const Unlocked unlocked(lock);
    bytes = SaveSnapshot(context_.env, context_.directory, context_.config.direct, snapshot.header,
                         snapshot.indexes);
  } catch (const std::exception&) {
    try {
      context_.env.Remove(context_.PathOf(kSnapshotTemporaryName));
    } catch (const IoError&) {
      // The next opening removes it.
    }
  }
  if (bytes == 0) {
    ++failures_;
    return;
  }
  state_.space.Overwritten(MetaFile::kSnapshot, bytes);
  marked_bytes_ = marked_bytes;
  marked_puts_ = marked_puts;
  unsaved_rows_ = unsaved_bytes_ = 0;
}

}  // namespace tierstore
