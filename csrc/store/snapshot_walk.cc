#include "store/snapshot_walk.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "store/write_queue.h"

namespace tierstore {
namespace {

constexpr std::size_t kEntriesAtOnce = 4096;  // of a hash index, with the mutex held

// Returns the slots up to the last row, without voids that end a block.
std::uint32_t SlotsOf(const Segment& segment) {
  return segment.slots == segment.flushed_slots ? segment.durable_slots : segment.slots;
}

}  // namespace

SnapshotWalk::SnapshotWalk(const StoreContext& context, StoreMutex& mutex, StoreState& state)
    : context_(context), mutex_(mutex), state_(state) {
  header_.store = context_.id;
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    auto& entry = header_.classes.emplace_back();
    entry.row_bytes = row_bytes;
    entry.slot_bits = row_class->slot_bits;
    for (const SegmentPtr& segment : row_class->segments) {
      // The snapshot names segments without newest versions, too: later rows in them must not bring old
      // versions back.
      entry.segments.push_back(segment == nullptr
                                   ? SnapshotHeader::Segment{0, 0}
                                   : SnapshotHeader::Segment{segment->number, SlotsOf(*segment)});
    }
  }
  const auto& tables = state_.rows.tables();
  for (std::uint32_t number = 0; number < tables.size(); ++number) {
    if (tables[number] == nullptr) continue;
    TableLocations& index = tables[number]->index;
    const RowClass& row_class = *tables[number]->row_class;
    const DenseRanges& dense = index.ranges();
    const std::size_t in_hash = index.size() - index.dense_rows();
    std::vector<SnapshotHeader::Range> ranges;
    for (std::size_t rank = 0; rank < dense.ranges(); ++rank)
      ranges.push_back({dense.ArrayOf(rank).number, dense.ArrayOf(rank).bits});
    header_.range_bits = dense.range_bits();
    header_.tables.push_back({number, row_class.geometry.row_bytes, in_hash, std::move(ranges)});
    const auto saved = std::find_if(header_.classes.begin(), header_.classes.end(), [&](const auto& entry) {
      return entry.row_bytes == row_class.geometry.row_bytes;
    });
    tables_.push_back({&index, &row_class, &*saved});
    index.HoldRanges(true);
  }
  bytes_ = header_.FileBytes();
}

SnapshotWalk::~SnapshotWalk() {
  for (const Table& table : tables_) table.index->HoldRanges(false);
}

void SnapshotWalk::Run(Lock& lock) {
  {
    const Unlocked unlocked(lock);
    writer_ =
        std::make_unique<SnapshotWriter>(context_.env, context_.directory, context_.config.direct, header_);
  }
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    CopyHash(lock, tables_[i], header_.tables[i]);
    tables_[i].index->HoldRanges(false);  // new ranges come behind the ranges that are copied
    CopyRanges(lock, tables_[i], header_.tables[i]);
  }
  const Unlocked unlocked(lock);
  writer_->Finish();
}

bool SnapshotWalk::IsWithin(const CommitRecord& commit) const {
  std::unordered_map<std::uint32_t, std::uint32_t> slots;  // by number
  for (const auto& row_class : header_.classes) {
    for (const auto& segment : row_class.segments) slots[segment.number] = segment.slots;
  }
  return std::all_of(commit.segments.begin(), commit.segments.end(), [&](const SegmentExtent& extent) {
    const auto found = slots.find(extent.number);
    return found == slots.end() || found->second <= extent.slots;
  });
}

std::uint64_t SnapshotWalk::Install(std::uint64_t commit, std::uint64_t history) {
  header_.commit = commit;
  header_.history = history;
  return writer_->Install(header_);
}

// Lets other threads have the mutex.
void SnapshotWalk::Pause(Lock& lock) {
  lock.unlock();
  mutex_.LockAfterAll(lock);
  if (stop_) throw Interrupted{};
}

// An ordinal may have gone to another segment since the walk began.
void SnapshotWalk::Note(const Table& table, Covered& covered) const {
  const RowClass& row_class = *table.row_class;
  if (covered.changes == row_class.changes) return;
  covered.changes = row_class.changes;
  covered.slot_bits = row_class.slot_bits;
  covered.slots.assign(table.saved->segments.size(), 0);
  for (std::size_t ordinal = 0; ordinal < covered.slots.size(); ++ordinal) {
    const SegmentPtr& segment = row_class.segments[ordinal];
    if (segment != nullptr && segment->number == table.saved->segments[ordinal].number)
      covered.slots[ordinal] = table.saved->segments[ordinal].slots;
  }
}

// Copies entries by descending hashes, which stay in order whatever is put meanwhile.
void SnapshotWalk::CopyHash(Lock& lock, const Table& table, SnapshotHeader::Table& saved) {
  TableLocations& index = *table.index;
  while (index.IsShrinking()) {
    index.GoOnShrinking(kEntriesAtOnce);
    Pause(lock);
  }
  Covered covered;
  std::vector<TableIndex::Entry> group(SnapshotReader::kEntriesPerGroup);
  std::size_t n = 0, got = 0;
  std::uint64_t bound = TableIndex::kNoBound;
  saved.entries = 0;
  do {
    if (index.hash().HasOwnOrder()) throw Interrupted{};
    Note(table, covered);
    got = index.hash().DumpBelow(bound, &group[n], std::min(kEntriesAtOnce, group.size() - n));
    {
      const Unlocked unlocked(lock);
      for (std::size_t i = n; i < n + got; ++i) {
        if (!covered.Has(group[i].location)) group[i].location = kChanged;
      }
      n += got;
      saved.entries += got;
      if (n == group.size() || (got == 0 && n > 0)) writer_->AddGroup(group.data(), std::exchange(n, 0));
    }
    bytes_ = std::max(bytes_, writer_->bytes());
    Pause(lock);
  } while (got > 0);
}

void SnapshotWalk::CopyRanges(Lock& lock, const Table& table, SnapshotHeader::Table& saved) {
  const DenseRanges& ranges = table.index->ranges();
  const unsigned range_bits = ranges.range_bits();
  Covered covered;
  Bytes array;
  for (std::size_t rank = 0; rank < saved.ranges.size(); ++rank) {
    const auto [number, bits, data] = ranges.ArrayOf(rank);
    array.assign(data, data + DenseRanges::ArrayBytes(range_bits, bits));
    saved.ranges[rank] = {number, bits};
    Note(table, covered);
    {
      const Unlocked unlocked(lock);
      for (std::size_t position = 0; position < ranges.ids_per_range(); ++position) {
        const Location location = DenseRanges::At(array.data(), range_bits, bits, position);
        if (location == TableIndex::kAbsent || covered.Has(location)) continue;
        DenseRanges::SetAt(array.data(), range_bits, bits, position, DenseRanges::NoLocation(bits));
      }
      writer_->AddRange(array.data(), array.size());
    }
    bytes_ = std::max(bytes_, writer_->bytes());
    Pause(lock);
  }
}

}  // namespace tierstore
