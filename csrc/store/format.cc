#include "store/format.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "common/crc32c.h"

namespace tierstore {
namespace {

constexpr char kHeaderMagic[9] = "TSTSEGMT";

}  // namespace

std::string UnknownFormat(std::uint32_t version) {
  return "is of format " + std::to_string(version) + ", and this release knows format " +
         std::to_string(kFormatVersion) +
         " alone: export the store with the release that wrote it, and import it with this one";
}

Geometry Geometry::For(std::uint32_t row_bytes) {
  Geometry g;
  g.row_bytes = row_bytes;
  g.record_bytes = static_cast<std::uint32_t>((kRecordHeaderBytes + row_bytes + 7) / 8 * 8);
  g.frame_bytes = kBlockBytes;
  while (g.frame_bytes < kMaxFrameBytes && (g.frame_bytes % g.record_bytes) * 50 > g.frame_bytes)
    g.frame_bytes *= 2;
  g.records_per_frame = g.frame_bytes / g.record_bytes;
  return g;
}

std::uint64_t Geometry::EndOffset(std::uint32_t slots) const {
  return slots == 0 ? kSegmentHeaderBytes : RoundToBlock(Offset(slots - 1) + record_bytes);
}

std::uint32_t Geometry::SlotAt(std::uint64_t offset) const {
  const std::uint64_t data = offset - kSegmentHeaderBytes;
  const std::uint64_t within = (data % frame_bytes + record_bytes - 1) / record_bytes;
  return static_cast<std::uint32_t>(data / frame_bytes * records_per_frame +
                                    std::min<std::uint64_t>(within, records_per_frame));
}

std::uint32_t Geometry::SlotsIn(std::uint64_t bytes) const {
  const std::uint64_t frames =
      bytes < kSegmentHeaderBytes + frame_bytes ? 1 : (bytes - kSegmentHeaderBytes) / frame_bytes;
  const std::uint64_t most = std::max<std::uint64_t>(1, kMaxSlots / records_per_frame);
  return static_cast<std::uint32_t>(std::min(frames, most) * records_per_frame);
}

Bytes SegmentHeader::Encode() const {
  const Geometry g = Geometry::For(row_bytes);
  Encoder out;
  out.Raw(kHeaderMagic, 8).Put(kFormatVersion).Put(row_bytes).Put(g.record_bytes).Put(g.frame_bytes);
  out.Put(number).Put(relocated ? kRelocatedFlag : 0u).Raw(store.data(), store.size());
  out.Put(Crc32c(out.bytes().data(), out.bytes().size()));
  return std::move(out.PadTo(kSegmentHeaderBytes).bytes());
}

SegmentHeader SegmentHeader::Decode(std::span<const std::byte> in, const std::string& path) {
  Decoder decoder(in, path);
  if (std::memcmp(decoder.Take(8), kHeaderMagic, 8) != 0) decoder.Fail("the file is not a segment");
  const auto version = decoder.Get<std::uint32_t>();
  SegmentHeader header;
  header.row_bytes = decoder.Get<std::uint32_t>();
  const auto record_bytes = decoder.Get<std::uint32_t>();
  const auto frame_bytes = decoder.Get<std::uint32_t>();
  header.number = decoder.Get<std::uint32_t>();
  const auto flags = decoder.Get<std::uint32_t>();
  header.relocated = (flags & kRelocatedFlag) != 0;
  std::memcpy(header.store.data(), decoder.Take(header.store.size()), header.store.size());
  const std::uint32_t crc = Crc32c(in.data(), decoder.at());
  if (decoder.Get<std::uint32_t>() != crc) decoder.Fail("the segment header is damaged (checksum mismatch)");
  if (version != kFormatVersion) decoder.Fail(UnknownFormat(version));
  if (header.row_bytes == 0 || header.row_bytes > kMaxRowBytes)
    decoder.Fail("the segment header has an impossible row size");
  const Geometry g = Geometry::For(header.row_bytes);
  if (g.record_bytes != record_bytes || g.frame_bytes != frame_bytes)
    decoder.Fail("the segment header has an impossible record layout");
  return header;
}

std::uint32_t RecordCrcPrefix(const StoreId& store, std::uint32_t segment) {
  return Crc32cExtend(Crc32cExtend(kCrc32cInit, store.data(), store.size()), &segment, sizeof segment);
}

// The checksum is computed over the record with its slot number in the checksum's place.
void SealRecords(std::byte* const records[], const std::uint64_t keys[], const std::uint32_t epochs[],
                 std::uint32_t first_slot, std::size_t n, const Geometry& geometry,
                 std::uint32_t crc_prefix) {
  for (std::size_t at = 0; at < n; at += 4) {
    const std::size_t count = std::min<std::size_t>(4, n - at);
    const void* data[4];
    std::uint32_t state[4];
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t j = at + std::min(i, count - 1);
      const RecordHeader header{first_slot + static_cast<std::uint32_t>(j), epochs[j], keys[j]};
      std::memcpy(records[j], &header, sizeof header);
      data[i] = records[j];
      state[i] = crc_prefix;
    }
    Crc32cExtend4(state, data, geometry.record_bytes);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t crc = Crc32cFinish(state[i]);
      std::memcpy(records[at + i], &crc, sizeof crc);
    }
  }
}

RecordHeader LoadRecordHeader(const std::byte* record) {
  RecordHeader header;
  std::memcpy(&header, record, sizeof header);
  return header;
}

bool RecordIsIntact(const std::byte* record, std::uint32_t slot, const Geometry& geometry,
                    std::uint32_t crc_prefix) {
  RecordHeader header = LoadRecordHeader(record);
  const std::uint32_t crc = std::exchange(header.crc, slot);
  std::uint32_t state = Crc32cExtend(crc_prefix, &header, sizeof header);
  state = Crc32cExtend(state, record + sizeof header, geometry.record_bytes - sizeof header);
  return Crc32cFinish(state) == crc;
}

}  // namespace tierstore
