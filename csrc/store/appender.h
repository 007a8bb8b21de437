// Appends records to the active segments: makes room, hands complete records to the write queue, and ends
// full segments.
//
// To append: Reserve a span, fill in the records at the places that LocateRecords gives, and Advance. Between
// Reserve and Advance no other thread may append to the same stream: calls append to kFromCallers, one call
// at a time; the compactor alone appends to the other two.
//
// Guarded by the store's mutex (store/store_mutex.h), but for LocateRecords and the bytes of a span's
// records.
#pragma once

#include <cstdint>
#include <memory>

#include "store/compactor_control.h"
#include "store/context.h"
#include "store/state.h"
#include "store/write_queue.h"

namespace tierstore {

// A Span is room for records.
struct Span {
  Segment* segment;
  Chunk* chunk;
  std::uint32_t first, count;  // slots

  // Gives the place of each record.
  void LocateRecords(std::byte* records[]) const;
};

class Appender {
 public:
  Appender(const StoreContext& context, StoreState& state, WriteQueue& queue, CompactorControl& control)
      : context_(context), segments_(state.segments), space_(state.space), queue_(queue), control_(control) {}

  // Makes room for 1 to `want` records, all in one chunk. May release the lock and wait: for the queue and,
  // in the stream of callers, for space. Nothing is used until Advance. Throws FullError, IoError,
  // ClosedError and the queue's pending error; in the streams of the compactor it throws Interrupted instead
  // of the last two.
  Span Reserve(Lock& lock, RowClass& row_class, Stream stream, std::uint32_t want);
  // Takes the span's first `n` records, which are complete, into the segment. The records count as live; the
  // caller passes them to RowIndex::Put next. `epochs` are needed where the segment holds copies.
  void Advance(const Span& span, std::uint32_t n, const std::uint64_t* keys, const std::uint32_t* epochs);
  // Queues the rows of an active segment, up to a block boundary behind which appending goes on.
  void Flush(const SegmentPtr& segment);

 private:
  SegmentPtr NewSegment(Lock& lock, RowClass& row_class, Stream stream);
  void QueueHeader(const SegmentPtr& segment);
  std::shared_ptr<Chunk> NewChunk(Lock& lock, const SegmentPtr& segment);
  bool ResumeIn(const SegmentPtr& segment, const std::shared_ptr<Chunk>& chunk);
  void FillWithVoids(Segment& segment, Chunk& chunk);
  void Seal(const SegmentPtr& segment);
  void WaitForSpace(Lock& lock, const RowClass& row_class, std::uint64_t bytes);

  const StoreContext& context_;
  SegmentSet& segments_;
  Space& space_;
  WriteQueue& queue_;
  CompactorControl& control_;
};

}  // namespace tierstore
