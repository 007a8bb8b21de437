// Scans read all rows of some tables, in the order in which the segments' files hold the rows, so that the
// device reads long stretches. Several segments are read and checked at a time.
//
// A scan gives each row that is stored when the scan begins, once, in a version that is the newest when the
// scan comes to the row; rows that are stored for the first time later do not come. Other calls and the
// compactor go on meanwhile (store/scan_capture.h says how no row is missed): between two calls of Next the
// scan holds no lock, no file and no space, so it may be left alone for as long as its user likes.
//
// Every record is checked as a read checks it. A damaged record that is no newest version is passed over.
// The row of any other damaged record is read once more, by Reader, whose error the call throws.
//
// Each look at the index takes the store's mutex (store/store_mutex.h) for at most a thousand rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/page_allocator.h"
#include "io/aligned_buffer.h"
#include "store/compactor_control.h"
#include "store/context.h"
#include "store/reader.h"
#include "store/scan_capture.h"
#include "store/state.h"

namespace tierstore {

// A ScanBatch has rows of one size, of any of the scan's tables.
struct ScanBatch {
  std::uint32_t row_bytes = 0;
  PageVector<std::uint64_t> keys;
  PageVector<std::uint8_t> rows;
};

// A scan under way. One thread at a time may use it, and it must not outlive its store.
class Scan {
 public:
  // Begins the scan. Tables that have no rows need not exist.
  Scan(const StoreContext& context, StoreMutex& mutex, StoreState& state, CompactorControl& control,
       Reader& reader, const std::vector<std::uint32_t>& tables);
  ~Scan();
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;

  bool InOwnProcess() const { return context_.InOwnProcess(); }
  // Returns the next rows, some megabytes; none at the end. A call that throws ends the scan. The store must
  // not be closed meanwhile (Store::Next).
  std::vector<ScanBatch> Next();

 private:
  struct Stretch;
  struct Records;
  // A Cursor is a segment that is read.
  struct Cursor {
    ScanCapture::Class* of = nullptr;
    ScanCapture::Part* part = nullptr;
    std::uint32_t ordinal = 0;
    AlignedBuffer buffer;
  };

  bool FillCursors();
  bool GiveLate(std::size_t least, std::vector<ScanBatch>& batches);
  void Visit(Cursor& cursor, ScanBatch& batch);
  SegmentPtr SegmentOf(const Cursor& cursor) const;
  Stretch Load(Cursor& cursor);
  static void CopyOut(const Chunk& chunk, Stretch& stretch, AlignedBuffer& buffer);
  void VisitSlots(Cursor& cursor, const Stretch& stretch, std::uint32_t last, ScanBatch& batch);
  std::uint32_t KeepNewest(Cursor& cursor, const Records& records, std::uint32_t last,
                           std::span<const std::uint32_t> damaged);
  void Settle(Cursor& cursor);
  void FindDamaged(Cursor& cursor, std::uint32_t table);

  const StoreContext& context_;
  StoreMutex& mutex_;
  StoreState& state_;
  CompactorControl& control_;
  Reader& reader_;
  ScanCapture capture_;  // told by state_.rows of rows that leave their slots
  std::vector<Cursor> cursors_;
  std::size_t class_at_ = 0, ordinal_at_ = 0;  // the next segment without a cursor
  bool ended_ = false;                         // whether an error has ended the scan
};

}  // namespace tierstore
