// The native row store holds rows of fixed sizes by 64-bit key (table << 48 | id), in append-only segments,
// with an index in memory and commits that survive crashes. docs/explanation/native_store.md explains the
// idea, and docs/reference/formats.md specifies the bytes.
//
// `Store` is the face of parts that each have a header of their own:
//
//   StoreState      what the store holds: CommitLog, SegmentSet, RowIndex, Space
//   Reader          reads rows
//   Scan            reads all rows
//   Appender        appends rows to segments; WriteQueue writes them in the background
//   Committer       makes commits and drops them
//   Snapshots       saves the index
//   Compactor       wins space back in the background; VictimPicker tells where, CompactorControl for whom
//   Recovery        opens a store; IndexRebuild fills its index
//
// All functions may be called from any thread. Calls exclude one another, except Read and Next, which run
// beside other calls: of a row that is written meanwhile they return the old or the new version. Close makes
// running calls throw ClosedError. Commits, Meta and Stats wait for no call. Threads work in the background:
// two write (two for each device), one compacts, and now and then one saves the index. Errors of the first
// three are thrown by the next call that is not Read, once.
//
// Throws IoError, CorruptError, FullError, ClosedError and InputError (store/errors.h), and CallEnded where
// the caller has set a limit (common/call_limit.h). A call that throws has no effect, except that Write may
// have stored a leading part of its rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/env.h"
#include "store/appender.h"
#include "store/committer.h"
#include "store/compactor.h"
#include "store/compactor_control.h"
#include "store/config.h"
#include "store/context.h"
#include "store/reader.h"
#include "store/scan.h"
#include "store/snapshots.h"
#include "store/state.h"
#include "store/store_mutex.h"
#include "store/write_queue.h"

namespace tierstore {

struct StoreCounters {
  std::uint64_t rows = 0, live_bytes = 0, disk_bytes = 0, index_bytes = 0, buffer_bytes = 0;
  std::uint64_t dense_rows = 0;                           // that the index has in dense ranges
  std::uint64_t segments = 0, kept_bytes = 0;             // kept: only for the sake of commits
  std::uint64_t snapshot_failures = 0, rebuilt_rows = 0;  // rebuilt: read from footers or records when opened
  std::uint64_t begun_snapshots = 0, saved_snapshots = 0;  // of the index, since the opening
  std::uint64_t written_rows = 0, written_bytes = 0, relocated_rows = 0;
  std::uint64_t renewed_commits = 0;  // times that the last commit was written anew, to name copies
  ReadCounters read;
  std::string io;       // how rows are read: "uring", "pread" or a test double's name
  bool direct = false;  // IO goes past the page cache
};

// KeyList is a list of a table's keys that is under way.
struct KeyList {
  explicit KeyList(std::uint32_t of) : table(of) {}

  std::uint32_t table;
  TableLocations::Listing ids;
};

class Store {
 public:
  // Opens the store in a directory, or makes a new one there. The directory must exist and be the store's
  // alone; `env` must live longer. `tables`: (table, row_bytes) pairs that are known beforehand.
  Store(Env& env, std::string directory, const StoreConfig& config,
        const std::vector<std::pair<std::uint32_t, std::uint32_t>>& tables);
  ~Store();

  // Returns false in a forked child, where the store can be neither used nor destroyed.
  bool InOwnProcess() const { return context_.InOwnProcess(); }
  // Gives the row and found[i] of each key, all of tables with the target's row size. Rows that are not found
  // are left as they are.
  void Read(std::span<const std::uint64_t> keys, const ReadTarget& target, bool* found);
  // Gives the place of each key's row, or Reader::kNowhere. Read takes rows in the order of their places;
  // rows whose places are near one another share a request. A place changes when the row is written or
  // compacted.
  void Places(std::span<const std::uint64_t> keys, std::uint64_t* places);
  // Stores row i, at `rows` + i·row_bytes or at `rows` + slots[i]·row_bytes, under keys[i]; of keys that come
  // twice the last row stays.
  // `stored` gets the number of rows stored, also when Write throws.
  void Write(std::span<const std::uint64_t> keys, const std::byte* rows, std::uint32_t row_bytes,
             const std::int32_t* slots = nullptr, std::size_t* stored = nullptr);
  // Makes room in a table's index for this many rows, which are about to be written.
  void Reserve(std::uint32_t table, std::uint32_t row_bytes, std::uint64_t rows);
  // Appends at most `limit` of the list's next keys, perhaps none; returns false at the end. Rows that were
  // there when the list began come once, whatever is written between two calls; rows that are new may come,
  // once.
  bool NextKeys(KeyList& list, std::size_t limit, std::vector<std::uint64_t>& keys);
  // Returns the number of a table's rows.
  std::uint64_t Count(std::uint32_t table);
  // Begins a scan of these tables (store/scan.h), which must not outlive the store.
  std::unique_ptr<Scan> BeginScan(const std::vector<std::uint32_t>& tables);
  // Returns the scan's next rows; none at the end. Scans take turns.
  std::vector<ScanBatch> Next(Scan& scan);

  // Makes all rows written so far durable and returns the commit's id. A tag keeps the commit until it is
  // dropped.
  std::uint64_t Commit(std::string meta, std::string tag);
  // Returns the kept commits, the oldest first.
  std::vector<CommitRecord> Commits();
  // Forgets a commit that is not the newest. Throws InputError when no kept commit has that id.
  void DropCommit(std::uint64_t id);
  // Returns the meta of the commit that the store was opened at or made last; "" before the first.
  std::string Meta();

  StoreCounters Stats();
  // Does what Space::CountsAreExact does.
  bool CountsAreExact();
  // Compacts until less than a tenth of the rows' slots is dead, as far as the cap and the kept commits
  // allow.
  void Compact();
  // Sets the cap of all files' bytes; calls that failed with FullError can be made again.
  void SetCap(std::uint64_t bytes);
  // Ends all calls and threads. Rows that were written since the last commit are lost. Later
  // calls wait for the first, and do nothing.
  void Close();

 private:
  std::unique_lock<std::timed_mutex> BeginCall();

  // Locks, in the order in which they are taken.
  std::mutex closing_;         // held during Close
  std::timed_mutex call_;      // held during every public call that excludes other calls
  std::timed_mutex scanning_;  // held during Next
  // Here come the mutexes of the reader's lanes.
  StoreMutex mutex_;  // guards what the parts share, as their headers say, and written_rows_
  // While mutex_ is held, no mutex of this process is taken except an Env's.

  std::atomic<int> reads_{
      0};  // reads from files, under way or waiting, by which the write queue paces itself
  StoreContext context_;
  CompactorControl control_;
  StoreState state_;
  WriteQueue queue_;
  Appender appender_;
  Snapshots snapshots_;
  Committer committer_;
  Reader reader_;
  Compactor compactor_;
  std::uint64_t written_rows_ = 0;
};

}  // namespace tierstore
