// When the index is saved, and how it is taken back.
#include <algorithm>

#include "common/call_limit.h"
#include "io/errors.h"
#include "store/errors.h"
#include "store/replay.h"
#include "store/store.h"

namespace tierstore {

// `lag`: how many times the size of a snapshot must have been written since the last one.
bool Store::SnapshotIsDue(double lag) const {
  std::uint64_t rows = 0;
  for (const auto& table : tables_) {
    if (table == nullptr) continue;
    if (table->index.HasOwnOrder()) return false;
    rows += table->index.size();
  }
  const std::uint64_t bytes = rows * 10;
  const std::uint64_t written = unsnapshotted_bytes_ + queue_.enqueued_bytes() - snapshot_mark_;
  return rows >= config_.snapshot_min_rows &&
         static_cast<double>(written) >= lag * static_cast<double>(bytes) &&
         UsedBytes() + bytes + SpaceReserve() <= cap_bytes_;
}

SnapshotHeader Store::CaptureSnapshot(std::vector<const TableIndex*>& indexes) const {
  SnapshotHeader header{store_id_, current_commit_, commit_history_, {}, {}};
  for (const auto& [row_bytes, row_class] : classes_) {
    auto& entry = header.classes.emplace_back();
    entry.row_bytes = row_bytes;
    entry.slot_bits = row_class->slot_bits;
    for (const SegmentPtr& segment : row_class->segments) {
      // Also those without newest versions: rows that come to them later must not bring their old ones back.
      entry.segments.push_back(segment == nullptr
                                   ? SnapshotHeader::Segment{0, 0}
                                   : SnapshotHeader::Segment{segment->number, segment->durable_slots});
    }
  }
  for (std::uint32_t number = 0; number < tables_.size(); ++number) {
    const auto& table = tables_[number];
    if (table == nullptr) continue;
    header.tables.push_back({number, table->row_class->geometry.row_bytes, table->index.size()});
    indexes.push_back(&table->index);
  }
  return header;
}

// The index must not change meanwhile. A failure costs only time at the next opening, so it is counted, not
// thrown.
void Store::WriteSnapshot(Lock& lock, const SnapshotHeader& header,
                          const std::vector<const TableIndex*>& indexes) {
  const std::uint64_t mark = queue_.enqueued_bytes();
  std::uint64_t bytes = 0;
  try {
    const Unlocked unlocked(lock);
    bytes = SaveSnapshot(env_, directory_, config_.direct, header, indexes);
  } catch (const std::exception&) {
    try {
      env_.Remove(directory_ + "/" + kSnapshotTemporaryName);
    } catch (const IoError&) {
      // The next opening removes it.
    }
  }
  if (bytes == 0) {
    ++snapshot_failures_;
    return;
  }
  snapshot_bytes_ = bytes;
  snapshot_bytes_written_ += bytes;
  snapshot_mark_ = mark;
  unsnapshotted_bytes_ = 0;
}

// Fills the index as of the snapshot's commit; false when there is no snapshot that can serve, with the index
// perhaps begun.
bool Store::LoadSnapshot(Replay& replay) try {
  const auto reader = SnapshotReader::Open(env_, directory_, config_.direct, store_id_);
  if (reader == nullptr) return false;
  const SnapshotHeader& header = reader->header();
  snapshot_bytes_ = reader->file_bytes();
  const auto current = std::find_if(commits_.begin(), commits_.end(), [this](const CommitRecord& commit) {
    return commit.id == current_commit_;
  });
  if (current == commits_.end() || header.history != commit_history_ || header.commit > current->id)
    return false;
  for (const auto& saved : header.classes) {
    if (saved.row_bytes == 0 || saved.row_bytes > kMaxRowBytes) return false;
    RowClass& row_class = ClassFor(saved.row_bytes);
    row_class.SetSlotBits(saved.slot_bits, config_.limits.locations);
  }
  return LoadSnapshotTables(*reader, replay);
} catch (const InputError&) {
  return false;  // it names tables that cannot be
} catch (const IoError&) {
  ++snapshot_failures_;
  return false;
}

bool Store::LoadSnapshotTables(SnapshotReader& reader, Replay& replay) {
  const SnapshotHeader& header = reader.header();
  std::map<std::uint32_t, std::vector<SegmentPtr>> by_ordinal;  // of the snapshot, by row_bytes
  for (const auto& saved : header.classes) {
    RowClass& row_class = ClassFor(saved.row_bytes);
    auto& segments = by_ordinal[saved.row_bytes];
    for (const auto& entry : saved.segments) {
      const auto found = segments_.find(entry.number);
      SegmentPtr segment = found == segments_.end() || found->second->retired ? nullptr : found->second;
      if (segment == nullptr && entry.number != 0) {
        segment = std::make_shared<Segment>();
        segment->row_class = &row_class;
        segment->slots = entry.slots;
        segment->ordinal = static_cast<std::uint32_t>(row_class.segments.size());
        row_class.segments.push_back(segment);
        replay.ghosts.push_back(segment);
      }
      if (segment != nullptr && (segment->row_class != &row_class || entry.slots > segment->slots))
        return false;
      if (segment != nullptr) replay.sources[segment.get()].covered = entry.slots;
      segments.push_back(segment);
    }
    if (row_class.segments.size() << row_class.slot_bits > TableIndex::kMaxLocation) return false;
  }

  std::vector<TableIndex::Entry> entries(SnapshotReader::kEntriesPerGroup);
  for (const auto& saved : header.tables) {
    const auto saved_class =
        std::find_if(header.classes.begin(), header.classes.end(),
                     [&](const auto& entry) { return entry.row_bytes == saved.row_bytes; });
    if (saved_class == header.classes.end()) return false;
    const auto& segments = by_ordinal[saved.row_bytes];
    Table& table = TableFor(saved.table, saved.row_bytes);
    table.index.Reserve(saved.entries);
    for (std::uint64_t left = saved.entries; left > 0;) {
      const std::size_t n = std::min<std::uint64_t>(left, entries.size());
      CheckCall();
      if (!reader.Read(entries.data(), n)) return false;
      for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t ordinal = entries[i].location >> saved_class->slot_bits;
        const std::uint32_t slot = entries[i].location & ((1u << saved_class->slot_bits) - 1);
        if (ordinal >= segments.size() || segments[ordinal] == nullptr) return false;
        if (slot >= saved_class->segments[ordinal].slots) return false;
        entries[i].location = table.row_class->Location(*segments[ordinal], slot);
        ++segments[ordinal]->live;
      }
      if (!table.index.Append(entries.data(), n)) return false;
      left -= n;
    }
  }
  return true;
}

// Back to an empty index, for a rebuild without the snapshot.
void Store::ForgetIndex(Replay& replay) {
  for (const SegmentPtr& ghost : replay.ghosts) ghost->row_class->segments.pop_back();
  replay = Replay{};
  for (auto& table : tables_) {
    if (table != nullptr) table.reset(new Table{table->row_class, {}});
  }
  for (auto& [number, segment] : segments_) {
    segment->live = 0;
    if (!segment->retired) replay.sources[segment.get()] = {};
  }
  unsnapshotted_bytes_ = 0;
  rebuilt_rows_ = 0;
}

}  // namespace tierstore
