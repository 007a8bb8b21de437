// Fills the index when a store is opened: from a snapshot, if one can serve, and from the footers (or
// records) of later rows.
//
// The store's mutex is held throughout, since no other thread uses the store yet.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "store/context.h"
#include "store/index_replay.h"
#include "store/snapshots.h"
#include "store/state.h"

namespace tierstore {

class IndexRebuild {
 public:
  // The segments of the current commit are open, and their row classes hold them.
  IndexRebuild(const StoreContext& context, StoreState& state, Snapshots& snapshots)
      : context_(context), state_(state), snapshots_(snapshots) {}

  // Puts the newest version of each row into the index, and counts them in Segment::live. Throws CorruptError
  // when needed bytes are damaged, IoError, CallEnded.
  void Run();

 private:
  // SavedTable is a table of the snapshot, with the meaning of its locations there.
  struct SavedTable {
    std::size_t number;  // in the header
    const SnapshotHeader::Table& table;
    const SnapshotHeader::RowClass& row_class;
    const std::vector<SegmentPtr>& segments;  // by ordinal of the snapshot

    // Makes the entries' locations locations of this store, and adds to `live`, by ordinal of the snapshot.
    // Drops entries that are kChanged: a replay brings their rows. Returns false when a location has no row.
    bool Translate(std::vector<TableIndex::Entry>& entries, std::vector<std::uint32_t>& live) const;
    void AddLive(const std::vector<std::uint32_t>& live) const;
  };

  struct Piece;

  bool LoadSnapshot();
  bool MatchSegments(const SnapshotHeader::RowClass& saved, std::vector<SegmentPtr>& segments);
  bool LoadTables(const SnapshotReader& reader);
  bool LoadTable(const SnapshotReader& reader, const SavedTable& saved);
  bool LoadInParallel(const SnapshotReader& reader, const SavedTable& saved, TableLocations& index);
  bool LoadInOrder(const SnapshotReader& reader, const SavedTable& saved, TableLocations& index);
  bool LoadRanges(const SnapshotReader& reader, const SavedTable& saved, TableLocations& index);
  bool LoadRangesInOrder(const SnapshotReader& reader, const SavedTable& saved, TableLocations& index);
  void ForgetRows();
  void ReplayAll();
  ReplaySource& SourceOf(const Segment& segment);

  const StoreContext& context_;
  StoreState& state_;
  Snapshots& snapshots_;
  ReplaySources sources_;
  // Segments that the snapshot names and the commit does not: in the end nothing may point to them.
  std::vector<SegmentPtr> ghosts_;
};

}  // namespace tierstore
