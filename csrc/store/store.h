// The native row store: rows of fixed sizes by 64-bit key (table << 48 | id), in append-only segments, with
// an index in memory and commits that survive crashes. docs/design.md has the idea, docs/reference/formats.md the
// bytes.
//
// All may be called from any thread. Calls exclude one another, but for Read, which goes on beside the
// others: of rows that are written meanwhile it gives the old or the new ones. Close makes calls under way
// throw ClosedError. Commits, Meta and Stats wait for no call. Threads work in the background: two write, one
// compacts. Their errors are thrown by the next call that is not Read, once.
//
// Throws IoError, CorruptError, FullError, ClosedError and InputError (store/errors.h), and CallEnded where
// the caller has set a limit (common/call_limit.h). A call that throws has no effect, except that Write may
// have stored a leading part of its rows.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/fork.h"
#include "io/env.h"
#include "store/index.h"
#include "store/index_snapshot.h"
#include "store/manifest.h"
#include "store/read_cost.h"
#include "store/segment.h"
#include "store/write_queue.h"

namespace tierstore {

// Bounds that tests make smaller, to reach them.
struct StoreLimits {
  std::size_t chunk_bytes = Chunk::kBytes;             // of a stretch that is written as one
  std::uint64_t locations = TableIndex::kMaxLocation;  // of row versions of one size
  std::uint64_t manifest_bytes = Manifest::kMaxBytes;
};

struct StoreConfig {
  std::uint64_t cap_bytes = std::uint64_t{1} << 40;  // of all files
  std::uint64_t segment_bytes = 0;                   // at most; 0: from the cap
  ReadEngine read_engine = ReadEngine::kAuto;
  unsigned queue_depth = 128;
  bool direct = true;            // IO past the page cache where the file system can
  std::size_t keep_commits = 1;  // older ones without a tag are dropped by the next commit
  std::uint64_t at_commit = 0;   // opened at this one; 0: the last
  bool read_only = false;        // nothing is resumed, compacted or saved; goes with a ReadOnlyEnv
  std::size_t write_buffer_bytes = 16 << 20;
  std::uint64_t snapshot_min_rows = 1 << 17;  // smaller stores open fast without
  std::optional<StoreId> store_id;            // of a new store; random unless given
  StoreLimits limits;
};

struct StoreCounters {
  std::uint64_t rows = 0, live_bytes = 0, disk_bytes = 0, index_bytes = 0, buffer_bytes = 0;
  std::uint64_t segments = 0, kept_bytes = 0;             // kept: only for the sake of commits
  std::uint64_t snapshot_failures = 0, rebuilt_rows = 0;  // rebuilt: read from footers or records when opened
  std::uint64_t read_rows = 0, read_bytes = 0, read_requests = 0;
  std::uint64_t written_rows = 0, written_bytes = 0, relocated_rows = 0;
  std::uint64_t renewed_commits = 0;  // times that the last commit was written anew, to name copies
  std::uint64_t merge_gap_bytes =
      0;  // between rows that are read at once, as this device wants it; 0: not known
  std::string io;
  bool direct = false;  // IO goes past the page cache
};

class Store {
 public:
  // The directory must exist and be no one else's. `tables`: (table, row_bytes) pairs that are known
  // beforehand.
  Store(Env& env, std::string directory, const StoreConfig& config,
        const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables);
  ~Store();

  // False in a forked child, where the store can be neither used nor destroyed.
  bool InOwnProcess() const;
  // rows[i] (at `rows` + i·row_bytes) and found[i] of each key. Rows that are not found are left as they are.
  void Read(std::span<const std::uint64_t> keys, std::byte* rows, std::uint32_t row_bytes, bool* found);
  // Of keys that come twice the last one stays. `stored` is told the number of rows stored, also when this
  // throws.
  void Write(std::span<const std::uint64_t> keys, const std::byte* rows, std::uint32_t row_bytes,
             std::size_t* stored = nullptr);
  // So many rows of a table are about to be written: saves the index its growth.
  void Expect(std::uint32_t table, std::uint32_t row_bytes, std::uint64_t rows);
  // Appends keys of a table from `cursor` (0 at first) on; returns the next cursor or TableIndex::kEnd.
  std::uint64_t Keys(std::uint32_t table, std::uint64_t cursor, std::size_t limit,
                     std::vector<std::uint64_t>& keys);

  // Makes everything written so far durable and returns the commit's id. A tag keeps it until it is dropped.
  std::uint64_t Commit(std::string meta, std::string tag);
  std::vector<CommitRecord> Commits();
  // Forgets a commit that is not the newest; InputError when there is none of that id.
  void DropCommit(std::uint64_t id);
  // Of the commit that the store was opened at or made last; "" before the first.
  std::string Meta();

  StoreCounters Stats();
  // Compacts until less than a tenth of the rows' slots is dead, as far as the cap and the kept commits let
  // it.
  void Compact();
  // The new cap of all files' bytes; calls that failed with FullError can be made again.
  void SetCap(std::uint64_t bytes);
  void Close();

 private:
  struct Table {
    RowClass* row_class;
    TableIndex index;
  };
  struct Span {  // room for records
    Segment* segment;
    Chunk* chunk;
    std::uint32_t first, count;
  };
  struct PendingRead;
  struct ReadEnd;
  struct ReadLane;
  struct Replay;
  struct Survey {                      // of all segments' bytes
    std::uint64_t live = 0, dead = 0;  // newest and superseded versions, outside of retired segments
    std::uint64_t released = 0;        // in segments that the last commit need not name any more
    std::uint64_t free = 0;            // below the cap
    std::uint64_t unit = 0;            // the largest segment
    std::uint64_t tolerated = 0;       // dead ones that compaction leaves
    bool Lags() const { return dead > tolerated + 4 * unit; }
  };
  struct Victim {
    SegmentPtr segment;
    bool with_kept = false;  // the rows too that only the last commit needs
  };
  // Alone in changing the manifest while it lives; waits until that is so.
  class Saving {
   public:
    Saving(Store& store, Lock& lock);
    ~Saving();
    Saving(const Saving&) = delete;
    Saving& operator=(const Saving&) = delete;

   private:
    Store& store_;
  };

  // store.cc
  void CheckOpen() const;
  void CheckWritable() const;
  std::unique_lock<std::timed_mutex> BeginCall();
  RowClass& ClassFor(std::uint32_t row_bytes);
  Table& TableFor(std::uint32_t table, std::uint32_t row_bytes);
  Table* FindTable(std::uint32_t table) { return table < tables_.size() ? tables_[table].get() : nullptr; }

  // read.cc
  void LockAfterReads(Lock& lock);
  void GiveWay(Lock& lock);
  void Locate(std::span<const std::uint64_t> keys, std::byte* rows, std::uint32_t row_bytes, bool* found,
              PendingRead& pending);
  bool Resolve(std::span<const std::uint64_t> keys, std::byte* rows, std::uint32_t row_bytes, bool* found,
               std::size_t base, PendingRead& pending);
  ReadLane& PickLane(std::size_t rows);
  void MeasureReads(BatchReader& reader, const PendingRead& pending);
  void Fetch(BatchReader& reader, PendingRead& pending, std::span<const std::uint64_t> keys, std::byte* rows);

  // append.cc
  Span Reserve(Lock& lock, RowClass& row_class, Stream stream, std::uint32_t want);
  void LocateRecords(const Span& span, std::byte* records[]) const;
  void Advance(const Span& span, std::uint32_t n, const std::uint64_t* keys, const std::uint32_t* epochs);
  void Put(const std::uint64_t* keys, const std::uint32_t* locations, std::size_t n, RowClass& row_class,
           bool relocated);
  SegmentPtr NewSegment(Lock& lock, RowClass& row_class, Stream stream);
  std::shared_ptr<Chunk> NewChunk(Lock& lock, const SegmentPtr& segment);
  void FillWithVoids(Segment& segment, Chunk& chunk);
  void Flush(const SegmentPtr& segment);
  void Seal(const SegmentPtr& segment);
  bool HasSpace(std::uint64_t bytes) const;
  bool HasOrdinal(const RowClass& row_class) const;
  void WaitForSpace(Lock& lock, const RowClass& row_class, std::uint64_t bytes);
  [[noreturn]] void ThrowFull(std::uint64_t bytes) const;
  [[noreturn]] void ThrowNoOrdinal(const RowClass& row_class) const;

  // commit.cc
  std::vector<SegmentExtent> CaptureExtents();
  void ReleaseCompaction();
  void SyncSegments(Lock& lock, const std::vector<SegmentExtent>& extents);
  void CheckManifest(const std::vector<CommitRecord>& commits, std::uint64_t limit) const;
  void SaveManifest(Lock& lock, std::vector<CommitRecord> commits);
  void ThrowIfCommitsFail() const;
  std::uint64_t UsedBytes() const {
    return reserved_bytes_ + manifest_bytes_ + snapshot_bytes_ + read_cost_bytes_;
  }
  void Pin(const std::vector<SegmentExtent>& extents, int change);
  void RetireIfDead(const SegmentPtr& segment);
  void DoomIfUnneeded(const SegmentPtr& segment);

  // renew.cc
  void BeginInterval();
  bool CanRenew() const;
  bool IsReleased(const Segment& segment) const;
  bool MayRelease(const Segment& segment) const;
  std::vector<SegmentExtent> ExtentsOfLastCommit() const;
  void RenewCommit(Lock& lock);

  // snapshots.cc
  bool SnapshotIsDue(double lag) const;
  SnapshotHeader CaptureSnapshot(std::vector<const TableIndex*>& indexes) const;
  void WriteSnapshot(Lock& lock, const SnapshotHeader& header, const std::vector<const TableIndex*>& indexes);
  bool LoadSnapshot(Replay& replay);
  bool LoadSnapshotTables(SnapshotReader& reader, Replay& replay);
  void ForgetIndex(Replay& replay);

  // compact.cc
  void CompactLoop();
  std::uint64_t LargestSegment() const;
  std::uint64_t SpaceReserve() const;
  Survey TakeSurvey() const;
  bool IsShort(const Survey& survey) const;
  Victim PickVictim(const Survey& survey) const;
  SegmentPtr PickToFree() const;
  SegmentPtr PickSparse(bool unpinned, const RowClass* only = nullptr) const;
  bool CanRelocate(const Segment& victim, std::uint32_t rows) const;
  bool CompactOnce(Lock& lock);
  void CompactSegment(Lock& lock, const Victim& victim);
  void ReadVictim(Lock& lock, Segment& victim, std::uint32_t first, std::uint32_t last, std::byte* data);
  void RelocateRecords(Lock& lock, const Victim& victim, const std::byte* data, std::uint32_t first,
                       std::uint32_t last);
  void RemoveDoomed(Lock& lock);
  void WakeCompactor();

  // recover.cc
  void Recover(const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables);
  Manifest LoadOrCreateManifest(const std::vector<std::string>& names);
  void OpenSegments(const Manifest& manifest);
  SegmentPtr OpenSegment(const SegmentExtent& extent);
  Footer ReadFooterOrScan(Segment& segment, std::uint32_t first_slot);

  // rebuild.cc
  void RebuildIndex();
  void ReplaySegment(Segment& segment, Replay& replay);
  void ReplayRun(Segment& segment, const std::uint64_t* keys, const std::uint32_t* slots, std::size_t n,
                 Replay& replay);
  void ResumeAppending(RowClass& row_class);

  Env& env_;
  const std::string directory_;
  const StoreConfig config_;
  const pid_t pid_;  // a forked child must not touch the parent's threads and files
  const unsigned fork_count_ = ForkCount();
  StoreId store_id_{};
  std::atomic<bool> closed_{false};
  std::mutex closing_;  // held during Close; taken before all others

  // Held during every public call but Read, Commits, Meta, Stats and Close; taken before what follows.
  std::timed_mutex call_;
  // Reads from files, while other calls go on: one batch at a time in each lane. Small ones go where less is
  // ahead of them, large ones always to the first, so that the second is soon free.
  struct ReadLane {
    std::timed_mutex mutex;               // taken before mutex_
    std::unique_ptr<BatchReader> reader;  // used with the lane's mutex held; made when first needed
    std::atomic<std::size_t> rows{0};     // being read or waiting
  };
  ReadLane lanes_[2];
  std::atomic<std::uint64_t> merge_gap_bytes_{0};  // 0 until this device was measured
  std::atomic<std::uint64_t> read_rows_{0}, read_bytes_{0}, read_requests_{0};

  std::atomic<int> reads_{0};          // from files, under way or waiting for a lane
  std::atomic<int> reads_waiting_{0};  // for mutex_
  std::mutex mutex_;                   // guards all that follows
  std::vector<std::unique_ptr<Table>> tables_;
  std::map<std::uint32_t, std::unique_ptr<RowClass>> classes_;  // by row_bytes
  std::map<std::uint32_t, SegmentPtr> segments_;                // by number; all that have a file
  std::uint32_t next_segment_ = 1;
  bool names_unsynced_ = false;  // a segment was created since the directory was synced
  std::vector<CommitRecord> commits_;
  std::uint64_t next_commit_ = 1;
  std::string meta_;
  std::string commit_failure_;  // why no commit can be made any more; "" when they can
  std::uint64_t current_commit_ = 0, commit_history_ = 0;  // the last commit made or opened
  std::uint64_t history_ = 0;                              // of the next commit
  bool changed_ = false;                                   // the index, since that commit was captured
  std::uint64_t snapshot_bytes_ = 0, snapshot_bytes_written_ = 0, snapshot_failures_ = 0, rebuilt_rows_ = 0;
  std::uint64_t unsnapshotted_bytes_ = 0,
                snapshot_mark_ = 0;    // not in the snapshot at opening; written until it
  std::uint64_t read_cost_bytes_ = 0;  // of the file
  std::uint64_t cap_bytes_ = 0;
  std::uint64_t segment_bytes_ = 0, manifest_bytes_ = 0, manifest_bytes_written_ = 0;
  std::uint64_t reserved_bytes_ = 0;  // by all segments
  std::uint64_t written_rows_ = 0, relocated_rows_ = 0, renewed_commits_ = 0;

  std::condition_variable compactor_work_, compaction_resumed_, space_, saved_;
  bool saving_ = false;                     // the manifest is being replaced
  bool compaction_held_ = false;            // the index must not change
  std::vector<SegmentPtr> doomed_;          // to be removed
  std::atomic<bool> removal_waits_{false};  // of some of them, for a read to end
  bool compactor_signal_ = false, compact_all_ = false, stop_ = false;
  std::int64_t gained_bytes_ = 0;      // by compaction since the last renewal
  std::uint64_t fruitless_scans_ = 0;  // times that the compactor found nothing to win
  std::uint64_t wanted_bytes_ = 0;     // a writer waits for so much space
  const RowClass* crowded_ = nullptr;  // a writer waits for an ordinal of this size

  WriteQueue queue_;
  std::thread compactor_;
};

}  // namespace tierstore
