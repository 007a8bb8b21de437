// Appending: room in the active segments, new segments within the byte cap, handing chunks to the writer.
#include <algorithm>
#include <cstdio>

#include "common/call_limit.h"
#include "common/key.h"
#include "store/store.h"

namespace tierstore {
namespace {

// "1.5 GiB", "24 MiB", "272 B": as tierstore.config.format_bytes writes them.
std::string FormatBytes(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, value < 1000 ? "%.4g %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

}  // namespace

// Room for 1 to `want` records, all in one chunk. May wait, with the mutex released. Nothing is used until
// Advance.
Store::Span Store::Reserve(Lock& lock, RowClass& row_class, Stream stream, std::uint32_t want) {
  while (true) {
    SegmentPtr segment = row_class.active[stream];
    if (segment != nullptr && segment->slots == row_class.slots_per_segment) {
      Seal(segment);
      continue;
    }
    if (segment == nullptr) segment = NewSegment(lock, row_class, stream);
    std::shared_ptr<Chunk> chunk = segment->OpenChunk();
    if (chunk == nullptr) chunk = NewChunk(lock, segment);
    if (chunk == nullptr) continue;
    const std::uint32_t in_chunk = row_class.slots_per_chunk - segment->slots % row_class.slots_per_chunk;
    const std::uint32_t in_segment = row_class.slots_per_segment - segment->slots;
    return Span{segment.get(), chunk.get(), segment->slots, std::min({want, in_chunk, in_segment})};
  }
}

// Where each record of the span goes.
void Store::LocateRecords(const Span& span, std::byte* records[]) const {
  const Geometry& geometry = span.segment->row_class->geometry;
  std::byte* at = span.chunk->buffer.data() + (geometry.Offset(span.first) - span.chunk->offset);
  std::uint32_t in_frame = span.first % geometry.records_per_frame;
  const std::uint32_t rest = geometry.frame_bytes - geometry.records_per_frame * geometry.record_bytes;
  for (std::uint32_t i = 0; i < span.count; ++i) {
    records[i] = at;
    at += geometry.record_bytes;
    if (++in_frame == geometry.records_per_frame) {
      in_frame = 0;
      at += rest;
    }
  }
}

// The span's first n records are complete.
void Store::Advance(const Span& span, std::uint32_t n, const std::uint64_t* keys,
                    const std::uint32_t* epochs) {
  if (n == 0) return;
  Segment& segment = *span.segment;
  RowClass& row_class = *segment.row_class;
  segment.slots += n;
  segment.live += n;
  segment.footer.keys.insert(segment.footer.keys.end(), keys, keys + n);
  if (segment.relocated) segment.footer.epochs.insert(segment.footer.epochs.end(), epochs, epochs + n);
  Chunk& chunk = *span.chunk;
  chunk.filled =
      row_class.geometry.Offset(segment.slots - 1) + row_class.geometry.record_bytes - chunk.offset;
  const SegmentPtr& shared = row_class.active[segment.stream];
  if (segment.slots == row_class.slots_per_segment) {
    Seal(shared);
  } else if (segment.slots % row_class.slots_per_chunk == 0) {
    const std::shared_ptr<Chunk> full = segment.OpenChunk();
    queue_.Enqueue(shared, full, row_class.chunk_bytes);
    queue_.Close(shared, full);
  }
}

// The newest version of each key is now at its location. The new segment's live count has them already.
void Store::Put(const std::uint64_t* keys, const std::uint32_t* locations, std::size_t n, RowClass& row_class,
                bool relocated) {
  changed_ = changed_ || n > 0;
  std::uint32_t previous[256];
  for (std::size_t at = 0; at < n;) {
    std::size_t run = 1;
    while (at + run < n && run < std::size(previous) && KeyTable(keys[at + run]) == KeyTable(keys[at])) ++run;
    Table& table = *tables_[KeyTable(keys[at])];
    table.index.Put(keys + at, locations + at, run, previous);
    for (std::size_t i = 0; i < run; ++i) {
      if (previous[i] == TableIndex::kAbsent) continue;
      const SegmentPtr& segment = row_class.SegmentOf(previous[i]);
      if (!relocated) segment->Keep(row_class.SlotOf(previous[i]));
      if (--segment->live == 0) RetireIfDead(segment);
    }
    at += run;
  }
}

SegmentPtr Store::NewSegment(Lock& lock, RowClass& row_class, Stream stream) {
  const bool relocated = stream != kFromCallers;
  const std::uint64_t bytes = row_class.MaxSegmentBytes(relocated);
  if (!relocated) WaitForSpace(lock, row_class, bytes);
  const auto free = std::find(row_class.segments.begin(), row_class.segments.end(), nullptr);
  const auto ordinal = static_cast<std::uint32_t>(free - row_class.segments.begin());
  if (row_class.FreeOrdinals() == 0) ThrowNoOrdinal(row_class);
  if (next_segment_ == ~std::uint32_t{0}) {
    throw FullError(directory_ +
                    ": the numbers of segments are used up; export the store and import it anew");
  }
  auto segment = std::make_shared<Segment>();
  segment->number = next_segment_++;  // used up even if the file cannot be made: it may be there by then
  segment->relocated = relocated;
  segment->stream = stream;
  segment->row_class = &row_class;
  segment->ordinal = ordinal;
  segment->crc_prefix = RecordCrcPrefix(store_id_, segment->number);
  segment->path = directory_ + "/" + SegmentName(segment->number);
  segment->file = env_.Open(segment->path, OpenMode::kCreate, config_.direct);
  names_unsynced_ = true;
  segment->reserved_bytes = bytes;
  reserved_bytes_ += bytes;

  auto header = std::make_shared<Chunk>();
  header->buffer = AlignedBuffer(kSegmentHeaderBytes);
  const Bytes encoded =
      SegmentHeader{row_class.geometry.row_bytes, segment->number, relocated, store_id_}.Encode();
  std::memcpy(header->buffer.data(), encoded.data(), encoded.size());
  header->filled = encoded.size();
  segment->chunks.push_back(header);
  queue_.Enqueue(segment, header, header->filled);
  queue_.Close(segment, header);

  if (free == row_class.segments.end()) {
    row_class.segments.push_back(segment);
  } else {
    *free = segment;
  }
  segments_[segment->number] = segment;
  row_class.active[stream] = segment;
  return segment;
}

// A chunk for the segment's next slot; nullptr when there is no room in it, or the segment is no longer the
// active one after the wait.
std::shared_ptr<Chunk> Store::NewChunk(Lock& lock, const SegmentPtr& segment) {
  RowClass& row_class = *segment->row_class;
  const Geometry& geometry = row_class.geometry;
  const std::uint32_t first = segment->slots / row_class.slots_per_chunk * row_class.slots_per_chunk;
  auto chunk = queue_.NewChunk(lock, geometry.Offset(first), row_class.chunk_bytes,
                               /*background=*/segment->relocated);
  if (row_class.active[segment->stream] != segment) return nullptr;
  // The buffer may have served before; records overwrite all of it but the ends of the frames.
  const std::size_t used = std::size_t{geometry.records_per_frame} * geometry.record_bytes;
  for (std::size_t at = 0; at < row_class.chunk_bytes; at += geometry.frame_bytes) {
    std::memset(chunk->buffer.data() + at + used, 0, geometry.frame_bytes - used);
  }
  segment->chunks.push_back(chunk);
  if (segment->slots != first) {  // appending resumes where a commit ended
    chunk->begin = chunk->filled = chunk->queued = chunk->written =
        geometry.EndOffset(segment->slots) - chunk->offset;
    FillWithVoids(*segment, *chunk);
    segment->flushed_slots = segment->slots;
    if (segment->slots == row_class.slots_per_segment) {
      Seal(segment);
      return nullptr;
    }
    if (segment->slots % row_class.slots_per_chunk == 0) {
      queue_.Close(segment, chunk);
      return nullptr;
    }
  }
  return chunk;
}

// Skips the slots that begin in the block that the last record ends in.
void Store::FillWithVoids(Segment& segment, Chunk& chunk) {
  const RowClass& row_class = *segment.row_class;
  const Geometry& geometry = row_class.geometry;
  const std::uint32_t next =
      std::min(geometry.SlotAt(geometry.EndOffset(segment.slots)), row_class.slots_per_segment);
  constexpr std::uint64_t kNoKey = 0;
  constexpr std::uint32_t kNoEpoch = 0;
  for (; segment.slots < next; ++segment.slots) {
    std::byte* record = chunk.buffer.data() + (geometry.Offset(segment.slots) - chunk.offset);
    std::memset(record, 0, geometry.record_bytes);
    SealRecords(&record, &kNoKey, &kNoEpoch, segment.slots, 1, geometry, segment.crc_prefix);
    segment.footer.voids.push_back(segment.slots);
    segment.footer.keys.push_back(kNoKey);
    if (segment.relocated) segment.footer.epochs.push_back(kNoEpoch);
    chunk.filled = geometry.Offset(segment.slots) + geometry.record_bytes - chunk.offset;
  }
}

// Queues what an active segment holds, up to a block boundary behind which appending goes on.
void Store::Flush(const SegmentPtr& held) {
  const SegmentPtr segment = held;
  if (segment->slots == segment->flushed_slots) return;
  const RowClass& row_class = *segment->row_class;
  segment->durable_slots = segment->slots;
  const std::shared_ptr<Chunk> chunk = segment->OpenChunk();
  if (chunk == nullptr) {  // the last record filled its chunk, which was queued whole: it ends with a block
    segment->flushed_slots = segment->slots;
    return;
  }
  const std::size_t end = row_class.geometry.EndOffset(segment->slots) - chunk->offset;
  FillWithVoids(*segment, *chunk);
  segment->flushed_slots = segment->slots;
  queue_.Enqueue(segment, chunk, end);
  if (segment->slots == row_class.slots_per_segment) {
    Seal(segment);
  } else if (segment->slots % row_class.slots_per_chunk == 0) {
    queue_.Close(segment, chunk);
  }
}

// The segment is full: queues its last chunk and its footer.
void Store::Seal(const SegmentPtr& held) {
  const SegmentPtr segment = held;  // `held` may be the active pointer, which is cleared
  RowClass& row_class = *segment->row_class;
  const std::uint64_t end = row_class.geometry.EndOffset(segment->slots);
  if (const std::shared_ptr<Chunk> chunk = segment->OpenChunk()) {
    if (end > chunk->offset + chunk->queued) queue_.Enqueue(segment, chunk, end - chunk->offset);
    queue_.Close(segment, chunk);
  }
  const Bytes encoded =
      segment->footer.Encode({row_class.geometry.row_bytes, segment->number, segment->relocated, store_id_});
  segment->footer = Footer{};
  auto footer = std::make_shared<Chunk>();
  footer->buffer = AlignedBuffer(encoded.size());
  std::memcpy(footer->buffer.data(), encoded.data(), encoded.size());
  footer->offset = end;
  footer->filled = encoded.size();
  segment->chunks.push_back(footer);
  segment->sealed = true;
  segment->durable_slots = segment->slots;
  reserved_bytes_ -= segment->reserved_bytes;
  segment->reserved_bytes = end + encoded.size();
  reserved_bytes_ += segment->reserved_bytes;
  row_class.active[segment->stream].reset();
  queue_.Enqueue(segment, footer, encoded.size());
  queue_.Close(segment, footer);
  WakeCompactor();
}

bool Store::HasSpace(std::uint64_t bytes) const { return UsedBytes() + bytes + SpaceReserve() <= cap_bytes_; }

// Whether there is a place in the index for another segment, besides those that compaction copies to.
bool Store::HasOrdinal(const RowClass& row_class) const { return row_class.FreeOrdinals() >= kStreams; }

// Waits for space under the cap and for locations, and for compaction where it has fallen behind.
void Store::WaitForSpace(Lock& lock, const RowClass& row_class, std::uint64_t bytes) {
  const auto has_room = [&] { return HasSpace(bytes) && HasOrdinal(row_class); };
  const auto may_go_on = [&] { return has_room() && !TakeSurvey().Lags(); };
  while (!may_go_on()) {
    CheckOpen();
    queue_.ThrowPending();
    if (!HasSpace(bytes)) wanted_bytes_ = bytes;
    if (!HasOrdinal(row_class)) crowded_ = &row_class;
    const std::uint64_t scans = fruitless_scans_;
    WakeCompactor();
    try {
      WaitInCall(space_, lock,
                 [&] { return stop_ || queue_.HasError() || fruitless_scans_ > scans || may_go_on(); });
    } catch (const CallEnded&) {
      wanted_bytes_ = 0;
      throw;
    }
    wanted_bytes_ = 0;
    crowded_ = nullptr;
    if (fruitless_scans_ == scans || stop_ || queue_.HasError()) continue;
    if (has_room()) return;
    if (!HasOrdinal(row_class)) ThrowNoOrdinal(row_class);
    ThrowFull(bytes);
  }
}

void Store::ThrowNoOrdinal(const RowClass& row_class) const {
  std::uint64_t live = 0;
  for (const SegmentPtr& segment : row_class.segments) live += segment == nullptr ? 0 : segment->live;
  throw FullError(
      directory_ + ": a store has places for " +
      std::to_string(row_class.max_ordinals * row_class.slots_per_segment) + " versions of rows of " +
      std::to_string(row_class.geometry.row_bytes) + " bytes, and " + std::to_string(live) +
      " rows take so many of them that no more can be won by compaction. Space on the device does not "
      "help: divide the tables of this row size among several stores (shards), or give them fewer rows");
}

void Store::ThrowFull(std::uint64_t bytes) const {
  std::uint64_t live = 0, kept = 0;
  for (const auto& [number, segment] : segments_) {
    live += std::uint64_t{segment->live} * segment->row_class->geometry.record_bytes;
    if (segment->pins > 0) kept += segment->reserved_bytes;
  }
  std::string commits;
  for (const CommitRecord& commit : commits_)
    commits += (commits.empty() ? "" : ", ") + std::to_string(commit.id);
  const std::uint64_t needed = UsedBytes() + bytes + SpaceReserve();
  throw FullError(
      directory_ + ": the cap of " + FormatBytes(cap_bytes_) + " is reached: " + FormatBytes(UsedBytes()) +
      " are in use, " + FormatBytes(live) + " of them by live rows; segments of " + FormatBytes(kept) +
      " are kept for commits (" + (commits.empty() ? "none" : commits) +
      "). To go on raise the cap by at least " + std::to_string(needed - cap_bytes_) + " bytes, to " +
      std::to_string(needed) +
      ", here or at the next opening, or drop commits that have a tag, or commit after fewer rows. What "
      "was written before is not lost and can be committed");
}

void Store::SetCap(std::uint64_t bytes) {
  const auto call = BeginCall();
  CheckWritable();
  Lock lock(mutex_);
  cap_bytes_ = bytes;
  WakeCompactor();
}

}  // namespace tierstore
