#include "store/scan.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "common/call_limit.h"
#include "common/key.h"
#include "common/thread_pool.h"
#include "io/errors.h"
#include "store/errors.h"
#include "store/manifest.h"

namespace tierstore {
namespace {

constexpr std::size_t kStretchBytes = 4 << 20;  // read at once, of one segment
constexpr std::size_t kSegmentsAtOnce = 4;
constexpr std::uint32_t kRowsPerLookup = 1024;
constexpr std::size_t kCopyBytes = 256 << 10;  // out of chunks, with the mutex held
// Late rows wait for one another: the more late rows there are, the denser they lie in the segments that they
// went to.
constexpr std::size_t kManyLateRows = 1 << 20;
constexpr std::size_t kLateBytes = 16 << 20;  // of late rows that are read at once

// Lets the compactor remove segments that this call kept it from removing.
struct WakeAtEnd {
  StoreMutex& mutex;
  const SegmentSet& segments;
  CompactorControl& control;

  ~WakeAtEnd() {
    if (!segments.removal_waits()) return;
    const Lock lock(mutex);
    control.Wake();
  }
};

// Returns the end of the segment's rows that are in the file, from `offset` on; later rows are in memory.
std::uint64_t EndInFile(const Segment& segment, std::uint64_t offset) {
  std::uint64_t end = ~std::uint64_t{0};
  for (const auto& chunk : segment.chunks) {
    const std::uint64_t begin = chunk->offset + chunk->begin;
    if (begin > offset) end = std::min(end, begin);
  }
  return end;
}

}  // namespace

// A Stretch is slots `first` to `last` of a segment, whose bytes are read. It holds the segment, which is
// null when there is nothing to read.
struct Scan::Stretch {
  SegmentPtr segment;
  std::uint32_t first = 0, last = 0;
  std::uint64_t begin = 0;  // offset of the first byte in the buffer
  std::size_t got = 0;      // bytes
};

// Records are intact.
struct Scan::Records {
  std::uint64_t* keys;
  std::uint32_t* slots;
  std::uint32_t n;
};

Scan::Scan(const StoreContext& context, StoreMutex& mutex, StoreState& state, CompactorControl& control,
           Reader& reader, const std::vector<std::uint32_t>& tables)
    : context_(context),
      mutex_(mutex),
      state_(state),
      control_(control),
      reader_(reader),
      capture_(tables),
      cursors_(kSegmentsAtOnce) {
  const Lock lock(mutex_);
  context_.CheckOpen();
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    const bool wanted = std::any_of(tables.begin(), tables.end(), [&](std::uint32_t table) {
      const RowIndex::Table* const found = state_.rows.FindTable(table);
      return found != nullptr && found->row_class == row_class.get();
    });
    if (wanted) capture_.Add(*row_class);
  }
  state_.rows.Attach(capture_);
}

Scan::~Scan() {
  const Lock lock(mutex_);
  state_.rows.Detach(capture_);
}

std::vector<ScanBatch> Scan::Next() {
  context_.CheckOpen();
  if (std::exchange(ended_, true)) throw InputError("the scan was ended by an error; begin another one");
  std::vector<ScanBatch> batches;
  while (batches.empty()) {
    CheckCall();
    const bool more = FillCursors();
    if (GiveLate(more ? kManyLateRows : 1, batches) || !more) break;
    batches.resize(cursors_.size());
    const WakeAtEnd wake{mutex_, state_.segments, control_};
    ParallelFor(0, static_cast<std::int64_t>(cursors_.size()), 1, [&](std::int64_t i, std::int64_t) {
      const auto at = static_cast<std::size_t>(i);
      if (cursors_[at].part != nullptr) Visit(cursors_[at], batches[at]);
    });
    std::erase_if(batches, [](const ScanBatch& batch) { return batch.keys.empty(); });
  }
  ended_ = false;
  return batches;
}

// Gives each cursor a segment. Returns false when there are no more segments.
bool Scan::FillCursors() {
  const Lock lock(mutex_);
  context_.CheckOpen();
  auto& classes = capture_.classes();
  bool more = false;
  for (Cursor& cursor : cursors_) {
    if (cursor.part != nullptr && cursor.part->next == cursor.part->end) cursor.part = nullptr;
    for (; cursor.part == nullptr && class_at_ < classes.size(); ++ordinal_at_) {
      ScanCapture::Class& of = classes[class_at_];
      if (ordinal_at_ == of.parts.size()) {
        ++class_at_;
        ordinal_at_ = ~std::size_t{0};
      } else if (ScanCapture::Part& part = of.parts[ordinal_at_]; part.left > 0) {
        cursor.of = &of;
        cursor.part = &part;
        cursor.ordinal = static_cast<std::uint32_t>(ordinal_at_);
        if (cursor.buffer.size() == 0) cursor.buffer = AlignedBuffer(kStretchBytes);
      }
    }
    more = more || cursor.part != nullptr;
  }
  return more;
}

// Reads late rows of a class that has at least this many of them, or late rows in damaged records. Returns
// false when there is no such class.
bool Scan::GiveLate(std::size_t least, std::vector<ScanBatch>& batches) {
  for (ScanCapture::Class& of : capture_.classes()) {
    const std::uint32_t row_bytes = of.row_class->geometry.row_bytes;
    ScanBatch batch{row_bytes, {}, {}};
    {
      const Lock lock(mutex_);
      if (capture_.failed()) throw std::bad_alloc();
      if (of.late.empty() || (of.late.size() < least && !std::exchange(of.urgent, false))) continue;
      const std::size_t n = std::min(of.late.size(), std::max<std::size_t>(1, kLateBytes / row_bytes));
      const auto first = of.late.end() - static_cast<std::ptrdiff_t>(n);
      batch.keys.assign(first, of.late.end());
      of.late.erase(first, of.late.end());
      if (of.late.empty()) of.late.shrink_to_fit();
    }
    batch.rows.resize(batch.keys.size() * row_bytes);
    const auto found = std::make_unique<bool[]>(batch.keys.size());
    reader_.Read(batch.keys, {reinterpret_cast<std::byte*>(batch.rows.data()), row_bytes}, found.get());
    if (!std::all_of(found.get(), found.get() + batch.keys.size(), [](bool there) { return there; }))
      throw CorruptError(context_.directory + ": rows have left the index while the store was scanned");
    batches.push_back(std::move(batch));
    return true;
  }
  return false;
}

void Scan::Visit(Cursor& cursor, ScanBatch& batch) {
  const Stretch stretch = Load(cursor);
  if (stretch.segment == nullptr) return;
  const Geometry& geometry = stretch.segment->row_class->geometry;
  const std::size_t slots = stretch.last - stretch.first;
  batch.row_bytes = geometry.row_bytes;
  batch.keys.reserve(slots);
  batch.rows.reserve(slots * geometry.row_bytes);
  while (cursor.part->next < stretch.last)
    VisitSlots(cursor, stretch, std::min(stretch.last, cursor.part->next + kRowsPerLookup), batch);
  if (cursor.part->next == cursor.part->end) Settle(cursor);
}

// Returns nullptr when all rows have left the segment: the segment may be gone, and its ordinal another
// segment's.
SegmentPtr Scan::SegmentOf(const Cursor& cursor) const {
  const SegmentPtr& segment = cursor.of->row_class->segments[cursor.ordinal];
  const bool there = cursor.part->left > 0 && segment != nullptr && segment->number == cursor.part->number;
  return there ? segment : nullptr;
}

// Reads the next slots of the cursor's segment from its file, or from memory where they are still there.
Scan::Stretch Scan::Load(Cursor& cursor) {
  ScanCapture::Part& part = *cursor.part;
  const Geometry& geometry = cursor.of->row_class->geometry;
  Lock lock(mutex_);
  context_.CheckOpen();
  const SegmentPtr segment = SegmentOf(cursor);
  if (segment == nullptr) {
    part.next = part.end;
    return {};
  }
  const std::uint64_t offset = geometry.Offset(part.next);
  const std::uint32_t frame = part.next / geometry.records_per_frame;
  const auto frames = static_cast<std::uint32_t>(kStretchBytes / geometry.frame_bytes);
  Stretch stretch{segment, part.next, std::min(part.end, (frame + frames) * geometry.records_per_frame),
                  offset / kBlockBytes * kBlockBytes, 0};
  if (const Chunk* const chunk = segment->ChunkAt(offset)) {
    CopyOut(*chunk, stretch, cursor.buffer);
    return stretch;
  }
  if (const std::uint64_t end = EndInFile(*segment, offset); end <= geometry.Offset(stretch.last - 1))
    stretch.last = geometry.SlotAt(end);
  lock.unlock();
  try {
    const std::size_t size = geometry.EndOffset(stretch.last) - stretch.begin;
    stretch.got = segment->file->Read(stretch.begin, cursor.buffer.data(), size);
  } catch (const IoError&) {  // read again, row by row, where rows are needed
  }
  return stretch;
}

// Copies the stretch out of the chunk that its first slot is in, and ends it where the chunk ends at the
// latest.
void Scan::CopyOut(const Chunk& chunk, Stretch& stretch, AlignedBuffer& buffer) {
  const RowClass& row_class = *stretch.segment->row_class;
  const Geometry& geometry = row_class.geometry;
  const std::uint32_t in_chunk = row_class.slots_per_chunk;
  const auto copies = static_cast<std::uint32_t>(kCopyBytes / geometry.record_bytes) + 1;
  stretch.last = std::min({stretch.last, stretch.first + copies, (stretch.first / in_chunk + 1) * in_chunk});
  const std::uint64_t offset = geometry.Offset(stretch.first);
  const std::uint64_t end = geometry.Offset(stretch.last - 1) + geometry.record_bytes;
  std::memcpy(buffer.data() + (offset - stretch.begin), chunk.buffer.data() + (offset - chunk.offset),
              end - offset);
  stretch.got = end - stretch.begin;
}

// Visits the slots from the part's next slot to `last`, at most kRowsPerLookup.
void Scan::VisitSlots(Cursor& cursor, const Stretch& stretch, std::uint32_t last, ScanBatch& batch) {
  ScanCapture::Part& part = *cursor.part;
  const Segment& segment = *stretch.segment;
  const Geometry& geometry = segment.row_class->geometry;
  const auto record_at = [&](std::uint32_t slot) {
    return cursor.buffer.data() + (geometry.Offset(slot) - stretch.begin);
  };
  std::uint64_t keys[kRowsPerLookup];
  std::uint32_t slots[kRowsPerLookup], damaged[kRowsPerLookup];
  std::uint32_t n = 0, bad = 0;
  for (std::uint32_t slot = part.next; slot < last; ++slot) {
    const bool there = geometry.Offset(slot) + geometry.record_bytes <= stretch.begin + stretch.got;
    if (!there || !RecordIsIntact(record_at(slot), slot, geometry, segment.crc_prefix)) {
      damaged[bad++] = slot;
    } else {
      keys[n] = LoadRecordHeader(record_at(slot)).key;
      slots[n++] = slot;
    }
  }
  const std::uint32_t live = KeepNewest(cursor, {keys, slots, n}, last, {damaged, bad});
  for (std::uint32_t i = 0; i < live; ++i) {
    if (!capture_.Wants(keys[i])) continue;
    const auto* const row = reinterpret_cast<const std::uint8_t*>(record_at(slots[i]) + kRecordHeaderBytes);
    batch.keys.push_back(keys[i]);
    batch.rows.insert(batch.rows.end(), row, row + geometry.row_bytes);
  }
}

// Moves the records that are newest versions to the front, and returns their number. All slots to `last`
// count as visited from then on.
std::uint32_t Scan::KeepNewest(Cursor& cursor, const Records& records, std::uint32_t last,
                               std::span<const std::uint32_t> damaged) {
  ScanCapture::Part& part = *cursor.part;
  Location locations[kRowsPerLookup];
  std::uint32_t live = 0;
  const Lock lock(mutex_);
  context_.CheckOpen();
  part.next = last;
  const SegmentPtr segment = SegmentOf(cursor);
  if (segment == nullptr) return 0;
  const RowClass& row_class = *segment->row_class;
  state_.rows.Find(records.keys, records.n, locations, &row_class);
  for (std::uint32_t i = 0; i < records.n; ++i) {
    if (locations[i] != row_class.LocationOf(*segment, records.slots[i])) continue;
    records.keys[live] = records.keys[i];
    records.slots[live++] = records.slots[i];
  }
  part.left -= live;
  part.damaged.insert(part.damaged.end(), damaged.begin(), damaged.end());
  return live;
}

// Ends a segment that is read. Rows that were not found lie in damaged records, and become late.
void Scan::Settle(Cursor& cursor) {
  std::size_t tables;
  {
    const Lock lock(mutex_);
    tables = cursor.part->left == 0 ? 0 : state_.rows.tables().size();
  }
  for (std::uint32_t table = 0; table < tables; ++table) FindDamaged(cursor, table);
  const Lock lock(mutex_);
  cursor.of->urgent = cursor.of->urgent || tables > 0;
  cursor.part->damaged = {};
  if (cursor.part->left == 0) return;
  throw CorruptError(
      context_.PathOf(SegmentName(cursor.part->number)) + ": " + std::to_string(cursor.part->left) +
      " rows are not where the index has them; `tierstore verify` says what is lost and what to do");
}

// Makes the table's rows in damaged records of the segment late.
void Scan::FindDamaged(Cursor& cursor, std::uint32_t table) {
  std::vector<std::uint64_t> ids;
  std::vector<Location> locations;
  TableLocations::Listing listing;
  for (bool more = true; more;) {
    const Lock lock(mutex_);
    context_.CheckOpen();
    RowIndex::Table* const entry = state_.rows.FindTable(table);
    if (entry == nullptr || entry->row_class != cursor.of->row_class || cursor.part->left == 0) return;
    ids.clear();
    locations.clear();
    more = entry->index.List(listing, kRowsPerLookup, ids, &locations);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const Segment& segment = *entry->row_class->SegmentOf(locations[i]);
      if (segment.number == cursor.part->number)
        capture_.RowLeaves(segment, entry->row_class->SlotOf(locations[i]), MakeKey(table, ids[i]));
    }
  }
}

}  // namespace tierstore
