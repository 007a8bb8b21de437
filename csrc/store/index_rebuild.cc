#include "store/index_rebuild.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "common/call_limit.h"
#include "common/key.h"
#include "common/thread_pool.h"
#include "io/errors.h"
#include "store/errors.h"

namespace tierstore {
namespace {

constexpr std::int64_t kGroupsPerPiece = 8;  // of the snapshot, that a thread reads at once

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

// Fills the index as of the snapshot's commit. Returns false when no snapshot can serve; the index may have
// some rows then.
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
  return false;  // the snapshot names tables that cannot be
} catch (const IoError&) {
  snapshots_.CountFailure();
  return false;
}

// Gives the snapshot's segments of one row class, by the snapshot's ordinals; a segment that the commit lacks
// becomes a ghost.
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
    if (segment != nullptr) SourceOf(*segment).covered = entry.slots;
    segments.push_back(segment);
  }
  return row_class.segments.size() << row_class.slot_bits <= TableIndex::kMaxLocation;
}

bool IndexRebuild::LoadTables(const SnapshotReader& reader) {
  const SnapshotHeader& header = reader.header();
  std::map<std::uint32_t, std::vector<SegmentPtr>> by_ordinal;  // of the snapshot, by row_bytes
  for (const auto& saved : header.classes) {
    if (!MatchSegments(saved, by_ordinal[saved.row_bytes])) return false;
  }
  for (std::size_t number = 0; number < header.tables.size(); ++number) {
    const auto& table = header.tables[number];
    const auto row_class = std::find_if(header.classes.begin(), header.classes.end(), [&](const auto& entry) {
      return entry.row_bytes == table.row_bytes;
    });
    if (row_class == header.classes.end()) return false;
    if (!LoadTable(reader, {number, table, *row_class, by_ordinal[table.row_bytes]})) return false;
  }
  return true;
}

bool IndexRebuild::LoadTable(const SnapshotReader& reader, const SavedTable& saved) {
  RowIndex::Table& table = state_.rows.TableFor(saved.table.table, saved.table.row_bytes);
  if (table.index.size() > 0) return false;  // the table comes twice
  if (!LoadInParallel(reader, saved, table.index)) {
    table.index.hash() = TableIndex();
    if (!LoadInOrder(reader, saved, table.index)) return false;
  }
  return table.index.MayBeDense() ? LoadRanges(reader, saved, table.index)
                                  : LoadRangesInOrder(reader, saved, table.index);
}

// A Piece is the entries that a thread restores at once.
struct IndexRebuild::Piece {
  explicit Piece(std::size_t segments) : live(segments) {}

  SnapshotReader::Groups groups;
  std::vector<TableIndex::Entry> spilled;
  std::vector<Location> locations;     // of a range
  std::vector<std::uint64_t> sampled;  // hashes, of all pieces of this memory
  std::vector<std::uint32_t> live;     // by ordinal of the snapshot, of all pieces of this memory

  void Sample(const TableLocations& index) {
    for (const TableIndex::Entry& entry : groups.entries) {
      if (index.IsSampled(entry.hash)) sampled.push_back(entry.hash);
    }
  }
};

// Returns false also for ids that were chosen to crowd the index, which only LoadInOrder can take.
bool IndexRebuild::LoadInParallel(const SnapshotReader& reader, const SavedTable& saved,
                                  TableLocations& index) {
  const RowClass& row_class = state_.rows.ClassFor(saved.table.row_bytes);
  index.hash().Reserve(saved.table.entries, Location{row_class.segments.size()} << row_class.slot_bits);
  const auto groups = static_cast<std::int64_t>(reader.GroupsOf(saved.number));
  struct Ends {
    std::uint64_t first, last;  // hashes
  };
  std::vector<Ends> ends(static_cast<std::size_t>((groups + kGroupsPerPiece - 1) / kGroupsPerPiece));
  std::vector<TableIndex::Entry> spilled;
  std::vector<std::uint32_t> live(saved.segments.size());
  std::vector<std::unique_ptr<Piece>> pieces;  // that no thread uses now
  bool good = true;
  std::size_t placed_entries = 0;
  std::mutex mutex;  // guards the five variables above
  ParallelFor(0, groups, kGroupsPerPiece, [&](std::int64_t begin, std::int64_t end) {
    CheckCall();
    std::unique_ptr<Piece> piece;
    {
      const std::lock_guard lock(mutex);
      if (!good) return;
      if (pieces.empty()) pieces.push_back(std::make_unique<Piece>(saved.segments.size()));
      piece = std::move(pieces.back());
      pieces.pop_back();
    }
    const auto first = static_cast<std::uint64_t>(begin);
    const auto& entries = piece->groups.entries;
    bool placed = reader.Read(saved.number, first, static_cast<std::uint64_t>(end - begin), piece->groups);
    const Ends hashes = placed ? Ends{entries.front().hash, entries.back().hash} : Ends{};
    placed = placed && saved.Translate(piece->groups.entries, piece->live) &&
             index.hash().Place(entries.data(), entries.size(), piece->spilled);
    if (placed && index.MayBeDense()) piece->Sample(index);
    const std::lock_guard lock(mutex);
    good = good && placed;
    if (!placed) return;
    ends[first / kGroupsPerPiece] = hashes;
    placed_entries += entries.size();
    spilled.insert(spilled.end(), piece->spilled.begin(), piece->spilled.end());
    piece->spilled.clear();
    pieces.push_back(std::move(piece));
  });
  for (const auto& piece : pieces) {
    for (std::size_t i = 0; i < live.size(); ++i) live[i] += piece->live[i];
  }
  for (std::size_t i = 1; i < ends.size() && good; ++i) good = ends[i].first < ends[i - 1].last;
  if (!good) return false;
  index.hash().Settle(spilled, placed_entries);
  for (const auto& piece : pieces) {
    for (const std::uint64_t hash : piece->sampled) index.NoteSampled(hash);
  }
  saved.AddLive(live);
  return true;
}

bool IndexRebuild::LoadInOrder(const SnapshotReader& reader, const SavedTable& saved, TableLocations& index) {
  index.hash().Reserve(saved.table.entries);
  Piece piece(saved.segments.size());
  for (std::uint64_t group = 0; group < reader.GroupsOf(saved.number); ++group) {
    CheckCall();
    if (!reader.Read(saved.number, group, 1, piece.groups)) return false;
    auto& entries = piece.groups.entries;
    if (!saved.Translate(entries, piece.live) || !index.hash().Append(entries.data(), entries.size()))
      return false;
    if (index.MayBeDense()) piece.Sample(index);
  }
  for (const std::uint64_t hash : piece.sampled) index.NoteSampled(hash);
  saved.AddLive(piece.live);
  return true;
}

// Loads ranges into ranges of the same ids. All ranges are made first, and then each thread fills a range.
bool IndexRebuild::LoadRanges(const SnapshotReader& reader, const SavedTable& saved, TableLocations& index) {
  DenseRanges& dense = index.ranges();
  const auto& ranges = saved.table.ranges;
  if (!ranges.empty() && reader.header().range_bits != dense.range_bits())
    return LoadRangesInOrder(reader, saved, index);
  const RowClass& row_class = state_.rows.ClassFor(saved.table.row_bytes);
  for (const auto& range : ranges) {
    if (dense.Has(range.number << dense.range_bits())) return false;
    dense.Add(range.number, Location{row_class.segments.size()} << row_class.slot_bits);
  }
  std::vector<std::unique_ptr<Piece>> pieces;  // that no thread uses now
  bool good = true;
  std::size_t filled = 0;
  std::mutex mutex;  // guards the three variables above
  ParallelFor(0, std::ssize(ranges), 1, [&](std::int64_t at, std::int64_t) {
    CheckCall();
    std::unique_ptr<Piece> piece;
    {
      const std::lock_guard lock(mutex);
      if (!good) return;
      if (pieces.empty()) pieces.push_back(std::make_unique<Piece>(saved.segments.size()));
      piece = std::move(pieces.back());
      pieces.pop_back();
    }
    const std::uint64_t number = ranges[static_cast<std::size_t>(at)].number;
    auto& entries = piece->groups.entries;
    const bool read = reader.ReadRange(saved.number, static_cast<std::size_t>(at), piece->groups) &&
                      saved.Translate(entries, piece->live);
    std::size_t here = 0;
    if (read) {
      piece->locations.assign(dense.ids_per_range(), TableIndex::kAbsent);
      for (const auto& [id, location] : entries)
        piece->locations[id & (dense.ids_per_range() - 1)] = location;
      here = dense.Fill(number, piece->locations.data());
    }
    const std::lock_guard lock(mutex);
    good = good && read;
    filled += here;
    pieces.push_back(std::move(piece));
  });
  if (!good) return false;
  dense.Count(filled);
  for (const auto& piece : pieces) saved.AddLive(piece->live);
  return true;
}

// Loads ranges into an index of another form.
bool IndexRebuild::LoadRangesInOrder(const SnapshotReader& reader, const SavedTable& saved,
                                     TableLocations& index) {
  Piece piece(saved.segments.size());
  for (std::size_t range = 0; range < saved.table.ranges.size(); ++range) {
    CheckCall();
    if (!reader.ReadRange(saved.number, range, piece.groups)) return false;
    if (!saved.Translate(piece.groups.entries, piece.live)) return false;
    for (const auto& [id, location] : piece.groups.entries) index.Put(id, location);
  }
  saved.AddLive(piece.live);
  return true;
}

bool IndexRebuild::SavedTable::Translate(std::vector<TableIndex::Entry>& entries,
                                         std::vector<std::uint32_t>& live) const {
  std::erase_if(entries, [](const TableIndex::Entry& entry) { return entry.location == kChanged; });
  for (TableIndex::Entry& entry : entries) {
    const Location ordinal = entry.location >> row_class.slot_bits;
    const auto slot = static_cast<std::uint32_t>(entry.location & ((Location{1} << row_class.slot_bits) - 1));
    if (ordinal >= segments.size() || slot >= row_class.segments[ordinal].slots) return false;
    const Segment* const segment = segments[ordinal].get();
    if (segment == nullptr) return false;
    entry.location = segment->row_class->LocationOf(*segment, slot);
    ++live[ordinal];
  }
  return true;
}

void IndexRebuild::SavedTable::AddLive(const std::vector<std::uint32_t>& live) const {
  for (std::size_t ordinal = 0; ordinal < live.size(); ++ordinal) {
    if (segments[ordinal] != nullptr) segments[ordinal]->live += live[ordinal];
  }
}

// Goes back to an empty index, for a rebuild without the snapshot.
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
  }
  snapshots_.ForgetRebuilt();
}

void IndexRebuild::ReplayAll() {
  for (const auto& [row_bytes, row_class] : state_.rows.classes())
    sources_[row_class.get()].resize(row_class->segments.size());
  IndexReplay(context_, state_, snapshots_, sources_).Run();
}

ReplaySource& IndexRebuild::SourceOf(const Segment& segment) {
  std::vector<ReplaySource>& sources = sources_[segment.row_class];
  if (sources.size() <= segment.ordinal) sources.resize(segment.ordinal + 1);
  return sources[segment.ordinal];
}

}  // namespace tierstore
