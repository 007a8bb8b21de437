// Copies the index to a snapshot file while calls and compaction go on.
//
// A walk begins at a commit. The commit gives the position in the log: all rows that there are then. The walk
// copies some entries at a time. An entry whose row was written or copied since the walk began is copied as
// kChanged, since its version before the position is not known any more; a replay will find the row's newest
// version. Hence the snapshot serves the commits that are made when the walk has ended, and the last commit
// before that if no row has changed since.
//
// A walk begins once its commit is durable, for this reason: until then compaction may copy versions that the
// commit before needs and that are superseded already (Committer, renewal). Such a copy has the epoch of its
// source. Behind the position a replay would take it for newer than the version that the walk has found.
//
// The commit must name all slots before the position, for this reason: an opening resumes behind the slots
// that the commit names, and rows that were written there would pass for rows of the snapshot.
//
// Functions are called with the store's mutex held (store/store_mutex.h), but for Install.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "store/context.h"
#include "store/index_snapshot.h"
#include "store/state.h"
#include "store/store_mutex.h"

namespace tierstore {

class SnapshotWalk {
 public:
  // Begins a walk. Until the walk has passed a table, or ends, ranges of the table do not become dense.
  SnapshotWalk(const StoreContext& context, StoreMutex& mutex, StoreState& state);
  ~SnapshotWalk();
  SnapshotWalk(const SnapshotWalk&) = delete;
  SnapshotWalk& operator=(const SnapshotWalk&) = delete;

  // Copies all, with the mutex held for some thousand entries at a time. Throws Interrupted after Stop, or
  // when a table's index has an order of its own; IoError; std::bad_alloc.
  void Run(Lock& lock);
  void Stop() { stop_ = true; }

  // Returns whether the commit names all slots before the position, of the segments that it names.
  bool IsWithin(const CommitRecord& commit) const;
  // Puts the snapshot in place, for this commit and later commits. Call it after Run, without the mutex.
  // Returns the snapshot's size. Throws IoError.
  std::uint64_t Install(std::uint64_t commit, std::uint64_t history);

  // Returns the bytes that the file takes, or will take.
  std::uint64_t bytes() const { return bytes_; }

 private:
  struct Table {
    TableLocations* index;
    const RowClass* row_class;
    const SnapshotHeader::RowClass* saved;
  };
  // Where rows of a table's row class lie that are in the snapshot with their locations.
  struct Covered {
    std::uint64_t changes = ~std::uint64_t{0};  // of the row class when this was noted
    unsigned slot_bits = 0;
    std::vector<std::uint32_t> slots;  // leading slots, by ordinal

    bool Has(Location location) const {
      const std::uint64_t ordinal = location >> slot_bits;
      return ordinal < slots.size() && (location & ((Location{1} << slot_bits) - 1)) < slots[ordinal];
    }
  };

  void Pause(Lock& lock);
  void Note(const Table& table, Covered& covered) const;
  void CopyHash(Lock& lock, const Table& table, SnapshotHeader::Table& saved);
  void CopyRanges(Lock& lock, const Table& table, SnapshotHeader::Table& saved);

  const StoreContext& context_;
  StoreMutex& mutex_;
  StoreState& state_;
  SnapshotHeader header_;
  std::vector<Table> tables_;
  std::unique_ptr<SnapshotWriter> writer_;
  std::uint64_t bytes_ = 0;
  bool stop_ = false;
};

}  // namespace tierstore
