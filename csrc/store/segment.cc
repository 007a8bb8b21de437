#include "store/segment.h"

#include <algorithm>
#include <bit>

#include "common/call_limit.h"
#include "store/errors.h"

namespace tierstore {

SegmentHeader Segment::Header(const StoreId& store) const {
  return {row_class->geometry.row_bytes, number, relocated, store};
}

// Keys of copies take as many bits as keys do here, and epochs at most as many bits as the segment's number.
std::uint64_t Segment::BytesOfCopies(std::uint32_t rows) const {
  const std::uint64_t end = row_class->geometry.EndOffset(slots),
                      capacity_of_copies = row_class->slots_per_segment;
  std::uint64_t bits = Footer::MostBytes(capacity_of_copies, true) * 8 / capacity_of_copies;
  if (sealed && slots > 0 && reserved_bytes > end) {
    // The bits count the zeros that fill the footer's last block, or segments of few slots would be copied
    // for ever.
    const std::uint64_t here = (reserved_bytes - end) * 8 / slots + 1;
    bits = here + (relocated ? 0 : std::bit_width(number));
  }
  return row_class->BytesOf(rows, bits);
}

void Segment::BeginInterval() {
  if (!older && !retired) row_class->counts.kept -= kept;
  older = true;
  kept = 0;
}

void Segment::Retire() {
  Counts& counts = row_class->counts;
  counts.slots -= slots;
  counts.live -= live;
  counts.kept -= older ? 0 : kept;
  retired = true;
}

void RowClass::AddSegment(const SegmentPtr& segment) {
  const auto free = std::find(segments.begin(), segments.end(), nullptr);
  if (free == segments.end()) return AppendSegment(segment);
  segment->ordinal = static_cast<std::uint32_t>(free - segments.begin());
  *free = segment;
  ++used_ordinals;
  ++changes;
}

void RowClass::AppendSegment(const SegmentPtr& segment) {
  segment->ordinal = static_cast<std::uint32_t>(segments.size());
  segments.push_back(segment);
  if (first_places.size() < segments.size()) {
    first_places.push_back(next_place);
    next_place += std::max(segment->capacity, segment->slots);
  }
  ++used_ordinals;
  ++changes;
}

Footer LoadKeys(const Segment& segment, const StoreId& store, std::uint32_t first_slot) {
  const RowClass& row_class = *segment.row_class;
  const Geometry& geometry = row_class.geometry;
  if (auto footer = Footer::Load(*segment.file, segment.Header(store));
      footer && footer->keys.size() >= segment.slots) {
    return *std::move(footer);
  }
  Footer footer;
  AlignedBuffer buffer(row_class.chunk_bytes);
  const std::uint32_t skipped = first_slot / row_class.slots_per_chunk * row_class.slots_per_chunk;
  footer.keys.resize(skipped);
  if (segment.relocated) footer.epochs.resize(skipped);
  for (std::uint32_t first = skipped; first < segment.slots; first += row_class.slots_per_chunk) {
    const std::uint32_t last = std::min(segment.slots, first + row_class.slots_per_chunk);
    const std::uint64_t offset = geometry.Offset(first), size = geometry.EndOffset(last) - offset;
    CheckCall();
    const std::size_t got = segment.file->Read(offset, buffer.data(), size);
    for (std::uint32_t slot = first; slot < last; ++slot) {
      const std::uint64_t at = geometry.Offset(slot) - offset;
      const std::byte* record = buffer.data() + at;
      if (at + geometry.record_bytes > got || !RecordIsIntact(record, slot, geometry, segment.crc_prefix)) {
        throw CorruptError(
            segment.path + ": the record at offset " + std::to_string(offset + at) +
            " is damaged (checksum mismatch), and the segment has no valid footer that tells its key");
      }
      const RecordHeader record_header = LoadRecordHeader(record);
      footer.keys.push_back(record_header.key);
      if (segment.relocated) footer.epochs.push_back(record_header.epoch);
      if (record_header.epoch == 0) footer.voids.push_back(slot);
    }
  }
  return footer;
}

}  // namespace tierstore
