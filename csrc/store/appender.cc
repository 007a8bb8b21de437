#include "store/appender.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/aligned_buffer.h"
#include "store/errors.h"

namespace tierstore {

Span Appender::Reserve(Lock& lock, RowClass& row_class, Stream stream, std::uint32_t want) {
  while (true) {
    SegmentPtr segment = row_class.active[stream];
    if (segment != nullptr && segment->slots == segment->capacity) {
      Seal(segment);
      continue;
    }
    if (segment == nullptr) segment = NewSegment(lock, row_class, stream);
    std::shared_ptr<Chunk> chunk = segment->OpenChunk();
    if (chunk == nullptr) chunk = NewChunk(lock, segment);
    if (chunk == nullptr) continue;
    const std::uint32_t in_chunk = row_class.slots_per_chunk - segment->slots % row_class.slots_per_chunk;
    const std::uint32_t in_segment = segment->capacity - segment->slots;
    return Span{segment.get(), chunk.get(), segment->slots, std::min({want, in_chunk, in_segment})};
  }
}

void Span::LocateRecords(std::byte* records[]) const {
  const Geometry& geometry = segment->row_class->geometry;
  std::byte* at = chunk->buffer.data() + (geometry.Offset(first) - chunk->offset);
  std::uint32_t in_frame = first % geometry.records_per_frame;
  const std::uint32_t rest = geometry.frame_bytes - geometry.records_per_frame * geometry.record_bytes;
  for (std::uint32_t i = 0; i < count; ++i) {
    records[i] = at;
    at += geometry.record_bytes;
    if (++in_frame == geometry.records_per_frame) {
      in_frame = 0;
      at += rest;
    }
  }
}

void Appender::Advance(const Span& span, std::uint32_t n, const std::uint64_t* keys,
                       const std::uint32_t* epochs) {
  if (n == 0) return;
  Segment& segment = *span.segment;
  RowClass& row_class = *segment.row_class;
  segment.AddSlots(n);
  segment.AddLive(n);
  segment.footer.keys.insert(segment.footer.keys.end(), keys, keys + n);
  if (segment.relocated) segment.footer.epochs.insert(segment.footer.epochs.end(), epochs, epochs + n);
  Chunk& chunk = *span.chunk;
  chunk.filled =
      row_class.geometry.Offset(segment.slots - 1) + row_class.geometry.record_bytes - chunk.offset;
  const SegmentPtr& shared = row_class.active[segment.stream];
  if (segment.slots == segment.capacity) {
    Seal(shared);
  } else if (segment.slots % row_class.slots_per_chunk == 0) {
    const std::shared_ptr<Chunk> full = segment.OpenChunk();
    queue_.Enqueue(shared, full, row_class.chunk_bytes);
    queue_.Close(shared, full);
  }
}

SegmentPtr Appender::NewSegment(Lock& lock, RowClass& row_class, Stream stream) {
  const bool relocated = stream != kFromCallers;
  if (!relocated) row_class.GrowSegments(space_.NextSegmentBytes());
  const std::uint64_t bytes = row_class.MaxSegmentBytes(relocated);
  if (!relocated) WaitForSpace(lock, row_class, bytes);
  if (row_class.FreeOrdinals() == 0) space_.ThrowNoOrdinal(row_class);
  auto segment = std::make_shared<Segment>();
  // The number is used up even if the file cannot be made, since the file may be there then.
  segment->number = segments_.TakeNumber();
  segment->relocated = relocated;
  segment->stream = stream;
  segment->row_class = &row_class;
  segment->capacity = row_class.slots_per_segment;
  // An array that grew would be copied within a call, and would leave its former memory on the heap.
  segment->footer.keys.reserve(segment->capacity);
  if (relocated) segment->footer.epochs.reserve(segment->capacity);
  segment->crc_prefix = RecordCrcPrefix(context_.id, segment->number);
  segment->path = context_.PathOf(SegmentName(segment->number));
  segment->file = context_.env.Create(segment->path, context_.config.direct, bytes);
  segments_.NoteCreated();
  segments_.SetReservedBytes(*segment, bytes);
  QueueHeader(segment);
  row_class.AddSegment(segment);
  segments_.Add(segment);
  row_class.active[stream] = segment;
  return segment;
}

void Appender::QueueHeader(const SegmentPtr& segment) {
  auto header = std::make_shared<Chunk>();
  header->buffer = AlignedBuffer(kSegmentHeaderBytes);
  const Bytes encoded = segment->Header(context_.id).Encode();
  std::memcpy(header->buffer.data(), encoded.data(), encoded.size());
  header->filled = encoded.size();
  segment->chunks.push_back(header);
  queue_.Enqueue(segment, header, header->filled);
  queue_.Close(segment, header);
}

// Returns a chunk for the segment's next slot. Returns nullptr when the chunk has no room, or when another
// segment is active after the wait.
std::shared_ptr<Chunk> Appender::NewChunk(Lock& lock, const SegmentPtr& segment) {
  RowClass& row_class = *segment->row_class;
  const Geometry& geometry = row_class.geometry;
  const std::uint32_t first = segment->slots / row_class.slots_per_chunk * row_class.slots_per_chunk;
  auto chunk = queue_.NewChunk(lock, geometry.Offset(first), row_class.chunk_bytes,
                               /*background=*/segment->relocated);
  if (row_class.active[segment->stream] != segment) return nullptr;
  // The buffer may have served before. Records overwrite the whole buffer but for the ends of the frames.
  const std::size_t used = std::size_t{geometry.records_per_frame} * geometry.record_bytes;
  for (std::size_t at = 0; at < row_class.chunk_bytes; at += geometry.frame_bytes) {
    std::memset(chunk->buffer.data() + at + used, 0, geometry.frame_bytes - used);
  }
  segment->chunks.push_back(chunk);
  return segment->slots == first || ResumeIn(segment, chunk) ? chunk : nullptr;
}

// Resumes appending where a commit ended, within the chunk. Returns false when the chunk has no room there.
bool Appender::ResumeIn(const SegmentPtr& segment, const std::shared_ptr<Chunk>& chunk) {
  const RowClass& row_class = *segment->row_class;
  chunk->begin = chunk->filled = chunk->queued = chunk->written =
      row_class.geometry.EndOffset(segment->slots) - chunk->offset;
  FillWithVoids(*segment, *chunk);
  segment->flushed_slots = segment->slots;
  if (segment->slots == segment->capacity) {
    Seal(segment);
    return false;
  }
  if (segment->slots % row_class.slots_per_chunk != 0) return true;
  queue_.Close(segment, chunk);
  return false;
}

// Skips the slots that begin in the block that the last record ends in.
void Appender::FillWithVoids(Segment& segment, Chunk& chunk) {
  const RowClass& row_class = *segment.row_class;
  const Geometry& geometry = row_class.geometry;
  const std::uint32_t next = std::min(geometry.SlotAt(geometry.EndOffset(segment.slots)), segment.capacity);
  constexpr std::uint64_t kNoKey = 0;
  constexpr std::uint32_t kNoEpoch = 0;
  for (; segment.slots < next; segment.AddSlots(1)) {
    std::byte* record = chunk.buffer.data() + (geometry.Offset(segment.slots) - chunk.offset);
    std::memset(record, 0, geometry.record_bytes);
    SealRecords(&record, &kNoKey, &kNoEpoch, segment.slots, 1, geometry, segment.crc_prefix);
    segment.footer.voids.push_back(segment.slots);
    segment.footer.keys.push_back(kNoKey);
    if (segment.relocated) segment.footer.epochs.push_back(kNoEpoch);
    chunk.filled = geometry.Offset(segment.slots) + geometry.record_bytes - chunk.offset;
  }
}

void Appender::Flush(const SegmentPtr& held) {
  const SegmentPtr segment = held;
  if (segment->slots == segment->flushed_slots) return;
  const RowClass& row_class = *segment->row_class;
  segment->durable_slots = segment->slots;
  const std::shared_ptr<Chunk> chunk = segment->OpenChunk();
  if (chunk == nullptr) {  // the last record filled its chunk, which was queued whole and ends with a block
    segment->flushed_slots = segment->slots;
    return;
  }
  const std::size_t end = row_class.geometry.EndOffset(segment->slots) - chunk->offset;
  FillWithVoids(*segment, *chunk);
  segment->flushed_slots = segment->slots;
  queue_.Enqueue(segment, chunk, end);
  if (segment->slots == segment->capacity) {
    Seal(segment);
  } else if (segment->slots % row_class.slots_per_chunk == 0) {
    queue_.Close(segment, chunk);
  }
}

// Ends a full segment: queues its last chunk and its footer.
void Appender::Seal(const SegmentPtr& held) {
  const SegmentPtr segment = held;  // `held` may be the active pointer, which is cleared
  RowClass& row_class = *segment->row_class;
  const std::uint64_t end = row_class.geometry.EndOffset(segment->slots);
  if (const std::shared_ptr<Chunk> chunk = segment->OpenChunk()) {
    if (end > chunk->offset + chunk->queued) queue_.Enqueue(segment, chunk, end - chunk->offset);
    queue_.Close(segment, chunk);
  }
  const std::size_t bytes = segment->footer.EncodedBytes(segment->Header(context_.id));
  auto footer = std::make_shared<Chunk>();
  footer->encode = [footer = std::exchange(segment->footer, {}), header = segment->Header(context_.id)] {
    return footer.Encode(header);
  };
  footer->offset = end;
  footer->filled = bytes;
  segment->chunks.push_back(footer);
  segments_.NoteSealed(*segment);
  segment->durable_slots = segment->slots;
  segments_.SetReservedBytes(*segment, end + bytes);
  row_class.active[segment->stream].reset();
  queue_.Enqueue(segment, footer, bytes);
  queue_.Close(segment, footer);
  control_.Wake();
}

// Waits for space under the cap and for locations, and for compaction if compaction has fallen behind.
void Appender::WaitForSpace(Lock& lock, const RowClass& row_class, std::uint64_t bytes) {
  const auto has_room = [&] { return space_.Fits(bytes) && row_class.HasOrdinalForCallers(); };
  const auto may_go_on = [&] { return has_room() && !space_.TakeSurvey().Lags(); };
  while (!may_go_on()) {
    context_.CheckOpen();
    queue_.ThrowPending();
    CompactionDemand demand;
    if (!space_.Fits(bytes)) demand.bytes = bytes;
    if (!row_class.HasOrdinalForCallers()) demand.crowded = &row_class;
    const bool in_vain = control_.Demand(lock, demand, [&] { return queue_.HasError() || may_go_on(); });
    if (!in_vain || queue_.HasError()) continue;
    if (has_room()) return;
    if (!row_class.HasOrdinalForCallers()) space_.ThrowNoOrdinal(row_class);
    space_.ThrowFull(bytes);
  }
}

}  // namespace tierstore
