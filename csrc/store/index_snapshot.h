// Writes and reads the file INDEX: the index as of a position in the log, so that opening reads only later
// rows. A store never needs the file: where INDEX is missing, damaged or of another history, footers and
// records have the same facts.
//
// The index goes on changing while a snapshot is written. So a row that was written or copied since the
// position may be in the snapshot as kChanged: its newest version is in a later slot. A snapshot therefore
// serves a commit that was made after all of it had been written, and later commits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/env.h"
#include "io/sequential.h"
#include "store/format.h"
#include "store/table_locations.h"

namespace tierstore {

inline constexpr char kSnapshotName[] = "INDEX";
inline constexpr char kSnapshotTemporaryName[] = "INDEX.tmp";

// kChanged stands in place of a location: the row has a version behind the slots of the snapshot.
inline constexpr Location kChanged = (Location{1} << TableIndex::kLocationBits) - 1;

struct SnapshotHeader {
  struct Segment {
    std::uint32_t number;  // 0 for an ordinal that is free
    std::uint32_t slots;   // before the position in the log
  };
  struct RowClass {
    std::uint32_t row_bytes;
    std::uint32_t slot_bits;
    std::vector<Segment> segments;  // by ordinal: what the upper bits of a location mean
  };
  struct Range {
    std::uint64_t number;
    std::uint32_t bits;  // of a location in the range's array
  };
  struct Table {
    std::uint32_t table;
    std::uint32_t row_bytes;
    std::uint64_t entries;  // of the hash index
    std::vector<Range> ranges;
  };

  StoreId store{};
  std::uint64_t commit = 0;  // the first that the snapshot serves
  std::uint64_t history = 0;
  std::vector<RowClass> classes;
  std::vector<Table> tables;
  std::uint32_t range_bits = 0;

  bool HasRanges() const;
  std::uint64_t UsedBytes() const;  // up to the zeros at the end
  std::uint64_t FileBytes() const;
};

// Writes a snapshot front to back to INDEX.tmp. All functions throw IoError.
class SnapshotWriter {
 public:
  // Begins a file. `header` equals the header that Install will get, but for the commit, the numbers of
  // entries, and the bits of ranges.
  SnapshotWriter(Env& env, const std::string& directory, bool direct, const SnapshotHeader& header);

  // Adds the next entries of a table: SnapshotReader::kEntriesPerGroup entries, but fewer at the table's end.
  void AddGroup(const TableIndex::Entry* entries, std::size_t n);
  // Adds the next range of a table, behind the table's entries.
  void AddRange(const std::byte* array, std::size_t size);
  std::uint64_t bytes() const { return bytes_; }
  // Makes all added groups and ranges durable.
  void Finish();
  // Puts the file in place of the old snapshot, durably. When this function throws, either snapshot may be in
  // place. Returns the file's size.
  std::uint64_t Install(const SnapshotHeader& header);

 private:
  void Append(const std::byte* data, std::size_t size);

  Env& env_;
  const std::string directory_;
  std::unique_ptr<File> file_;
  SequentialWriter out_;
  Bytes group_;
  std::uint64_t bytes_ = 0;
};

class SnapshotReader {
 public:
  // Returns nothing when there is no snapshot, or it is damaged or of another store.
  static std::unique_ptr<SnapshotReader> Open(Env& env, const std::string& directory, bool direct,
                                              const StoreId& store);

  const SnapshotHeader& header() const { return header_; }
  std::uint64_t file_bytes() const { return header_.FileBytes(); }

  // Groups of entries in a table of the header.
  static constexpr std::size_t kEntriesPerGroup = 1 << 15;
  std::uint64_t GroupsOf(std::size_t table) const;
  // Memory for groups, used again and again.
  struct Groups {
    std::vector<TableIndex::Entry> entries;
    AlignedBuffer bytes;
  };
  // Reads the entries of some groups of a table, in their order; locations may be kChanged. Returns
  // false when the entries are damaged. Any thread may call it. Throws IoError.
  bool Read(std::size_t table, std::uint64_t first_group, std::uint64_t groups, Groups& out) const;
  // Reads the entries of a dense range in the same way: `entries` gets ids in place of hashes.
  bool ReadRange(std::size_t table, std::size_t range, Groups& out) const;

 private:
  explicit SnapshotReader(std::unique_ptr<File> file) : file_(std::move(file)) {}
  bool ReadHeader(const StoreId& store);
  const std::byte* ReadBytes(std::uint64_t begin, std::uint64_t size, AlignedBuffer& buffer) const;

  std::unique_ptr<File> file_;
  std::uint32_t version_ = 0;
  SnapshotHeader header_;
  std::vector<std::uint64_t> offsets_;                     // of each table's groups
  std::vector<std::vector<std::uint64_t>> range_offsets_;  // of each table's ranges
};

}  // namespace tierstore
