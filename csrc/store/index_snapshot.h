// The file INDEX: the index at one commit, so that opening reads only later rows. A store never needs it:
// where the file is missing, damaged or of another history, footers and records have the same facts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/env.h"
#include "io/sequential.h"
#include "store/format.h"
#include "store/index.h"

namespace tierstore {

inline constexpr char kSnapshotName[] = "INDEX";
inline constexpr char kSnapshotTemporaryName[] = "INDEX.tmp";

struct SnapshotHeader {
  struct Segment {
    std::uint32_t number;  // 0 for an ordinal that is free
    std::uint32_t slots;   // of the commit
  };
  struct RowClass {
    std::uint32_t row_bytes;
    std::uint32_t slot_bits;
    std::vector<Segment> segments;  // by ordinal: what the upper bits of a location mean
  };
  struct Table {
    std::uint32_t table;
    std::uint32_t row_bytes;
    std::uint64_t entries;
  };

  StoreId store{};
  std::uint64_t commit = 0;
  std::uint64_t history = 0;
  std::vector<RowClass> classes;
  std::vector<Table> tables;

  std::uint64_t UsedBytes() const;  // up to the zeros at the end
  std::uint64_t FileBytes() const;
};

// Writes a new snapshot in place of the old one, durably. `indexes`: one for each of header.tables. Returns
// its size. Throws IoError; then the old snapshot or none is in place.
std::uint64_t SaveSnapshot(Env& env, const std::string& directory, bool direct, const SnapshotHeader& header,
                           const std::vector<const TableIndex*>& indexes);

class SnapshotReader {
 public:
  // Returns nothing when there is no snapshot, or it is damaged or of another store.
  static std::unique_ptr<SnapshotReader> Open(Env& env, const std::string& directory, bool direct,
                                              const StoreId& store);

  const SnapshotHeader& header() const { return header_; }
  std::uint64_t file_bytes() const { return header_.FileBytes(); }

  // The next entries of the tables, in the order of the header; `n` is at most what is left of the current
  // table and kEntriesPerGroup. False when they are damaged.
  static constexpr std::size_t kEntriesPerGroup = 1 << 15;
  bool Read(TableIndex::Entry* out, std::size_t n);

 private:
  explicit SnapshotReader(std::unique_ptr<File> file) : file_(std::move(file)), in_(*file_) {}
  bool ReadHeader(const StoreId& store);

  std::unique_ptr<File> file_;
  SequentialReader in_;
  SnapshotHeader header_;
  Bytes group_;
};

}  // namespace tierstore
