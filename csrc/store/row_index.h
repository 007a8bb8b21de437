// Knows the location of the newest version of each row. Each table has an index over the segments of the
// table's row size.
//
// Tables of one row size share a row class, and with it segments. Tables and row classes are never removed
// while the store is open, so references to them stay valid; segments come and go.
//
// Guarded by the store's mutex (store/store_mutex.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "store/context.h"
#include "store/scan_capture.h"
#include "store/segment_set.h"
#include "store/table_locations.h"

namespace tierstore {

class RowIndex {
 public:
  struct Table {
    RowClass* row_class;
    TableLocations index;
  };

  RowIndex(const StoreContext& context, SegmentSet& segments);

  // Returns the class of a row size, which the first call makes.
  RowClass& ClassFor(std::uint32_t row_bytes);
  const std::map<std::uint32_t, std::unique_ptr<RowClass>>& classes() const { return classes_; }
  // Returns the most bytes that a new segment of any class takes.
  std::uint64_t LargestSegmentBytes() const;

  // Returns the table, which the first call makes. Throws InputError when rows of this size cannot be stored,
  // or when the table's rows have another size.
  Table& TableFor(std::uint32_t table, std::uint32_t row_bytes);
  // Returns nullptr when there is no such table.
  Table* FindTable(std::uint32_t table) const {
    return table < tables_.size() ? tables_[table].get() : nullptr;
  }
  // Returns the tables by number; null where there is none.
  const std::vector<std::unique_ptr<Table>>& tables() const { return tables_; }

  // Gives the location of each key, or TableIndex::kAbsent where its table is not of the class, if any is
  // given.
  void Find(const std::uint64_t* keys, std::size_t n, Location* locations, const RowClass* row_class) const;

  // Notes that the newest version of each key is now at its location, in a segment whose `live` counts these
  // rows already. Former versions are superseded. Copies (`relocated`) equal their sources, so the last
  // commit does not need the sources.
  void Put(const std::uint64_t* keys, const Location* locations, std::size_t n, RowClass& row_class,
           bool relocated);

  // Tells the capture of rows that leave their slots, from now on until it is detached.
  void Attach(ScanCapture& capture) { captures_.push_back(&capture); }
  void Detach(ScanCapture& capture) { std::erase(captures_, &capture); }

  // Returns the number of rows that were put since the opening, copies included.
  std::uint64_t puts() const { return puts_; }
  // Returns whether rows were put since the last MarkCommitted.
  bool changed() const { return changed_; }
  void MarkCommitted() { changed_ = false; }
  void MarkChanged() { changed_ = true; }

  // Forgets all rows, and keeps tables and classes.
  void ForgetRows();
  void Clear();

 private:
  class Ahead;

  const StoreContext& context_;
  SegmentSet& segments_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::map<std::uint32_t, std::unique_ptr<RowClass>> classes_;  // by row_bytes
  std::vector<ScanCapture*> captures_;
  std::uint64_t puts_ = 0;
  bool changed_ = false;
};

}  // namespace tierstore
