#include "store/index_rebuild.h"

#include <algorithm>
#include <utility>

#include "common/call_limit.h"
#include "common/key.h"
#include "io/errors.h"
#include "store/errors.h"

namespace tierstore {
namespace {

constexpr std::size_t kKeysPerRun = 256;

}  // namespace

void IndexRebuild::Run() {
  const bool loaded = LoadSnapshot();
  if (!loaded) ForgetRows();
  ReplayAll();
  const auto is_used = [](const SegmentPtr& ghost) { return ghost->live > 0; };
  if (loaded && std::any_of(ghosts_.begin(), ghosts_.end(), is_used)) {
    ForgetRows();  // the snapshot is not of this history
    ReplayAll();
  }
  for (const SegmentPtr& ghost : ghosts_) ghost->row_class->RemoveSegment(*ghost);
}

// Fills the index as of the snapshot's commit; false when there is no snapshot that can serve, with the index
// perhaps begun.
bool IndexRebuild::LoadSnapshot() try {
  const auto reader =
      SnapshotReader::Open(context_.env, context_.directory, context_.config.direct, context_.id);
  if (reader == nullptr) return false;
  const SnapshotHeader& header = reader->header();
  state_.space.SetFileBytes(MetaFile::kSnapshot, reader->file_bytes());
  const CommitRecord* const current = state_.commits.Current();
  if (current == nullptr || header.history != state_.commits.current_history || header.commit > current->id)
    return false;
  for (const auto& saved : header.classes) {
    if (saved.row_bytes == 0 || saved.row_bytes > kMaxRowBytes) return false;
    state_.rows.ClassFor(saved.row_bytes).SetSlotBits(saved.slot_bits, context_.config.limits.locations);
  }
  return LoadTables(*reader);
} catch (const InputError&) {
  return false;  // it names tables that cannot be
} catch (const IoError&) {
  snapshots_.CountFailure();
  return false;
}

// The snapshot's segments of one row class, by its ordinals; where the commit lacks one, a ghost.
bool IndexRebuild::MatchSegments(const SnapshotHeader::RowClass& saved, std::vector<SegmentPtr>& segments) {
  RowClass& row_class = state_.rows.ClassFor(saved.row_bytes);
  const auto& by_number = state_.segments.by_number();
  for (const auto& entry : saved.segments) {
    const auto found = by_number.find(entry.number);
    SegmentPtr segment = found == by_number.end() || found->second->retired ? nullptr : found->second;
    if (segment == nullptr && entry.number != 0) {
      segment = std::make_shared<Segment>();
      segment->row_class = &row_class;
      segment->slots = entry.slots;
      row_class.AppendSegment(segment);
      ghosts_.push_back(segment);
    }
    if (segment != nullptr && (segment->row_class != &row_class || entry.slots > segment->slots))
      return false;
    if (segment != nullptr) sources_[segment.get()].covered = entry.slots;
    segments.push_back(segment);
  }
  return row_class.segments.size() << row_class.slot_bits <= TableIndex::kMaxLocation;
}

bool IndexRebuild::LoadTables(SnapshotReader& reader) {
  const SnapshotHeader& header = reader.header();
  std::map<std::uint32_t, std::vector<SegmentPtr>> by_ordinal;  // of the snapshot, by row_bytes
  for (const auto& saved : header.classes) {
    if (!MatchSegments(saved, by_ordinal[saved.row_bytes])) return false;
  }
  for (const auto& table : header.tables) {
    const auto row_class = std::find_if(header.classes.begin(), header.classes.end(), [&](const auto& entry) {
      return entry.row_bytes == table.row_bytes;
    });
    if (row_class == header.classes.end()) return false;
    if (!LoadTable(reader, {table, *row_class, by_ordinal[table.row_bytes]})) return false;
  }
  return true;
}

bool IndexRebuild::LoadTable(SnapshotReader& reader, const SavedTable& saved) {
  const std::uint32_t slot_bits = saved.row_class.slot_bits;
  RowIndex::Table& table = state_.rows.TableFor(saved.table.table, saved.table.row_bytes);
  table.index.Reserve(saved.table.entries);
  std::vector<TableIndex::Entry> entries(
      std::min<std::uint64_t>(saved.table.entries, SnapshotReader::kEntriesPerGroup));
  for (std::uint64_t left = saved.table.entries; left > 0;) {
    const std::size_t n = std::min<std::uint64_t>(left, entries.size());
    CheckCall();
    if (!reader.Read(entries.data(), n)) return false;
    for (std::size_t i = 0; i < n; ++i) {
      const Location ordinal = entries[i].location >> slot_bits;
      const auto slot = static_cast<std::uint32_t>(entries[i].location & ((Location{1} << slot_bits) - 1));
      if (ordinal >= saved.segments.size() || saved.segments[ordinal] == nullptr) return false;
      if (slot >= saved.row_class.segments[ordinal].slots) return false;
      Segment& segment = *saved.segments[ordinal];
      entries[i].location = table.row_class->LocationOf(segment, slot);
      ++segment.live;
    }
    if (!table.index.Append(entries.data(), n)) return false;
    left -= n;
  }
  return true;
}

// Back to an empty index, for a rebuild without the snapshot.
void IndexRebuild::ForgetRows() {
  for (const SegmentPtr& ghost : ghosts_) {
    ghost->row_class->RemoveSegment(*ghost);
    ghost->row_class->segments.pop_back();
  }
  ghosts_.clear();
  sources_.clear();
  state_.rows.ForgetRows();
  for (const auto& [number, segment] : state_.segments.by_number()) {
    segment->live = 0;
    if (!segment->retired) sources_[segment.get()] = {};
  }
  snapshots_.ForgetRebuilt();
}

void IndexRebuild::ReplayAll() {
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    for (std::size_t i = 0; i < row_class->segments.size(); ++i) {
      const SegmentPtr segment = row_class->segments[i];
      if (sources_[segment.get()].covered < segment->slots) Replay(*segment);
    }
  }
}

void IndexRebuild::Replay(Segment& segment) {
  Source& source = sources_[&segment];
  Footer footer = LoadKeys(segment, context_.id, source.covered);
  source.epochs = std::move(footer.epochs);
  std::uint64_t keys[kKeysPerRun];
  std::uint32_t slots[kKeysPerRun];
  std::size_t n = 0;
  auto void_slot = std::lower_bound(footer.voids.begin(), footer.voids.end(), source.covered);
  for (std::uint32_t slot = source.covered; slot < segment.slots; ++slot) {
    if (void_slot != footer.voids.end() && *void_slot == slot) {
      ++void_slot;
      continue;
    }
    if (n == kKeysPerRun || (n > 0 && KeyTable(keys[0]) != KeyTable(footer.keys[slot]))) {
      ReplayRun(segment, keys, slots, std::exchange(n, 0));
    }
    keys[n] = footer.keys[slot];
    slots[n++] = slot;
  }
  if (n > 0) ReplayRun(segment, keys, slots, n);
}

// Keys of one table.
void IndexRebuild::ReplayRun(Segment& segment, const std::uint64_t* keys, const std::uint32_t* slots,
                             std::size_t n) {
  CheckCall();
  RowClass& row_class = *segment.row_class;
  TableIndex& index = state_.rows.TableFor(KeyTable(keys[0]), row_class.geometry.row_bytes).index;
  Location previous[kKeysPerRun];
  // Brings the entries into the cache; a key may come twice, so one by one below.
  index.Find(keys, n, previous);
  for (std::size_t i = 0; i < n; ++i) {
    const Location there = index.Put(keys[i], row_class.LocationOf(segment, slots[i]));
    ++segment.live;
    if (there == TableIndex::kAbsent) continue;
    Segment& other = *row_class.SegmentOf(there);
    if (AgeOf(other, row_class.SlotOf(there)) > AgeOf(segment, slots[i])) {
      index.Put(keys[i], there);
      --segment.live;
    } else {
      --other.live;
    }
  }
  snapshots_.CountRebuilt(n, n * row_class.geometry.record_bytes);
}

// Of two versions of a row the one with the higher age is newer.
std::uint64_t IndexRebuild::AgeOf(const Segment& segment, std::uint32_t slot) const {
  const Source& source = sources_.at(&segment);
  if (slot < source.covered) return 0;
  const std::uint64_t epoch = segment.relocated ? source.epochs[slot] : segment.number;
  return epoch << 32 | std::uint64_t{segment.relocated} << 31 | slot;
}

}  // namespace tierstore
