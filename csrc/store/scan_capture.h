// Knows what a scan (store/scan.h) has to give: the rows that were stored when the scan began, by segment.
//
// Rows are only ever appended. So each row lies in exactly one captured slot, and once it is written anew or
// copied it lies behind all captured slots, for good. If the scan has not come to the slot by then, the row
// is late: the capture notes its key, by which the scan reads the newest version. A capture takes 40 bytes
// per segment, and 8 bytes per late row that was not yet read.
//
// Guarded by the store's mutex (store/store_mutex.h).
#pragma once

#include <cstdint>
#include <vector>

#include "store/segment.h"

namespace tierstore {

class ScanCapture {
 public:
  // A Part has the rows that the capture has of a segment.
  struct Part {
    std::uint32_t number = 0;            // of the segment; 0 where there is none
    std::uint32_t next = 0, end = 0;     // slots that the scan has yet to come to
    std::uint32_t left = 0;              // rows that are neither given nor late
    std::vector<std::uint32_t> damaged;  // ascending slots, before `next`, whose records are damaged
  };
  struct Class {
    RowClass* row_class;
    std::vector<Part> parts;          // by ordinal
    std::vector<std::uint64_t> late;  // keys
    bool urgent = false;              // whether late rows lie in damaged records
  };

  // Begins with nothing captured. Only rows of `tables` become late.
  explicit ScanCapture(const std::vector<std::uint32_t>& tables);

  // Captures all rows of a row size.
  void Add(RowClass& row_class);
  bool Wants(std::uint64_t key) const;

  // Call it before a row leaves its slot. It never throws: a lack of memory shows in failed().
  void RowLeaves(const Segment& segment, std::uint32_t slot, std::uint64_t key) noexcept;

  std::vector<Class>& classes() { return classes_; }
  // Returns whether a late row could not be noted.
  bool failed() const { return failed_; }

 private:
  std::vector<bool> wanted_;  // by table
  std::vector<Class> classes_;
  bool failed_ = false;
};

}  // namespace tierstore
