// Counts the bytes of a store: how much of the cap its files take, how many bytes are live, and how many
// bytes a writer may add.
//
// All files count: segments at the most that they will take (Segment::reserved_bytes), the manifest, the
// saved index and DEVICE at their size, and a saved index that is being written at the size that it will
// have. A writer leaves Reserve() bytes to compaction.
//
// Guarded by the store's mutex (store/store_mutex.h).
#pragma once

#include <cstdint>
#include <iterator>
#include <numeric>
#include <string>

#include "store/commit_log.h"
#include "store/row_index.h"
#include "store/segment_set.h"

namespace tierstore {

// The files beside the segments.
enum class MetaFile { kManifest, kSnapshot, kSnapshotTemporary, kReadCost };

// The bytes of all segments and of their rows.
struct Survey {
  std::uint64_t live = 0, dead = 0;  // newest and superseded versions, outside of retired segments
  std::uint64_t released = 0;        // in segments that the last commit need not name any more
  std::uint64_t free = 0;            // below the cap
  std::uint64_t unit = 0;            // bytes of the largest segment
  std::uint64_t tolerated = 0;       // dead bytes that compaction leaves

  // Returns whether compaction has fallen behind, so that a writer waits for it.
  bool Lags() const { return dead > tolerated + 4 * unit; }
};

class Space {
 public:
  Space(const StoreContext& context, const RowIndex& rows, const SegmentSet& segments,
        const CommitLog& commits);

  void SetCap(std::uint64_t bytes) { cap_bytes_ = bytes; }
  // Notes that the file has this size now. Overwritten counts its bytes as written, too.
  void SetFileBytes(MetaFile file, std::uint64_t bytes) { BytesOf(file) = bytes; }
  void Overwritten(MetaFile file, std::uint64_t bytes) {
    BytesOf(file) = bytes;
    written_bytes_ += bytes;
  }
  std::uint64_t meta_bytes() const {
    return std::accumulate(std::begin(file_bytes_), std::end(file_bytes_), std::uint64_t{0});
  }
  std::uint64_t meta_bytes_written() const { return written_bytes_; }
  // Returns the most bytes of the next segment of callers.
  std::uint64_t NextSegmentBytes() const { return SegmentBytes(context_.config, cap_bytes_, UsedBytes()); }

  // Return whether this many more bytes fit the cap, for compaction and for other writers.
  bool FitsForCompaction(std::uint64_t bytes) const { return UsedBytes() + bytes <= cap_bytes_; }
  bool Fits(std::uint64_t bytes) const { return FitsForCompaction(bytes + Reserve()); }

  Survey TakeSurvey() const;
  // Returns whether the counts of slots and bytes, which change with each row, are what a look at every
  // segment finds. Tests call it.
  bool CountsAreExact() const;

  // Throws FullError with what takes the space and what to do: for `bytes` that do not fit, and for a row
  // class without an ordinal for another segment.
  [[noreturn]] void ThrowFull(std::uint64_t bytes) const;
  [[noreturn]] void ThrowNoOrdinal(const RowClass& row_class) const;

 private:
  std::uint64_t& BytesOf(MetaFile file) { return file_bytes_[static_cast<std::size_t>(file)]; }
  std::uint64_t UsedBytes() const { return segments_.reserved_bytes() + meta_bytes(); }
  std::uint64_t Reserve() const;
  std::string DescribeOlderCommits() const;

  const StoreContext& context_;
  const RowIndex& rows_;
  const SegmentSet& segments_;
  const CommitLog& commits_;
  std::uint64_t cap_bytes_;
  std::uint64_t file_bytes_[4] = {};
  std::uint64_t written_bytes_ = 0;
};

}  // namespace tierstore
