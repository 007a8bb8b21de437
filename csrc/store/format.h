// Describes segment files: geometry, header, records. store/footer.h has the footer.
// docs/reference/formats.md specifies every byte.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "io/env.h"
#include "store/coding.h"

namespace tierstore {

using StoreId = std::array<std::byte, 16>;

inline constexpr std::uint32_t kFormatVersion = 2;
inline constexpr std::uint64_t kSegmentHeaderBytes = kBlockBytes;
inline constexpr std::size_t kRecordHeaderBytes = 16;
inline constexpr std::size_t kMaxFrameBytes = 1 << 20;
inline constexpr std::uint32_t kMaxRowBytes = 256 << 10;
inline constexpr unsigned kMaxSlotBits = 22;
inline constexpr std::uint32_t kMaxSlots = 1 << kMaxSlotBits;  // whose keys wait in memory for the footer
inline constexpr std::uint64_t kMaxSegmentBytes = 1 << 30;

constexpr std::uint64_t RoundToBlock(std::uint64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

// Returns what an error says of a file of another version.
std::string UnknownFormat(std::uint32_t version);

// Says where the records of one row size lie in a segment. Records are packed into frames, and no record
// crosses into the next frame; a frame is the smallest power of two, from one block on, that wastes at most 2
// %, or kMaxFrameBytes. So a small row is read with one block.
struct Geometry {
  std::uint32_t row_bytes = 0;
  std::uint32_t record_bytes = 0;
  std::uint32_t frame_bytes = 0;
  std::uint32_t records_per_frame = 0;

  static Geometry For(std::uint32_t row_bytes);

  std::uint64_t Offset(std::uint32_t slot) const {
    return kSegmentHeaderBytes + std::uint64_t{slot / records_per_frame} * frame_bytes +
           std::uint64_t{slot % records_per_frame} * record_bytes;
  }
  // Returns the first block boundary behind `slots` records.
  std::uint64_t EndOffset(std::uint32_t slots) const;
  // Returns the first slot that begins at a block boundary or behind it.
  std::uint32_t SlotAt(std::uint64_t offset) const;
  // Returns the number of slots of a segment of at most `bytes` (but at least one frame).
  std::uint32_t SlotsIn(std::uint64_t bytes) const;
};

inline constexpr std::uint32_t kRelocatedFlag = 1;

struct SegmentHeader {
  std::uint32_t row_bytes = 0;
  std::uint32_t number = 0;
  bool relocated = false;  // holds copies that compaction made
  StoreId store{};

  Bytes Encode() const;  // kSegmentHeaderBytes
  // Throws CorruptError, also when the geometry is not this version's.
  static SegmentHeader Decode(std::span<const std::byte> in, const std::string& path);
};

// Returns the start value of a record's checksum, of store and segment: a record of another file fails.
std::uint32_t RecordCrcPrefix(const StoreId& store, std::uint32_t segment);

// A record is crc (u32), epoch (u32), key (u64), row. The epoch is the number of the segment that the row was
// first written to. An epoch of 0 marks a void, a slot that was skipped so that a commit's last block is
// never written again.
struct RecordHeader {
  std::uint32_t crc;
  std::uint32_t epoch;
  std::uint64_t key;
};
static_assert(sizeof(RecordHeader) == kRecordHeaderBytes);

// Fills in headers and checksums of `n` records whose rows are in place.
void SealRecords(std::byte* const records[], const std::uint64_t keys[], const std::uint32_t epochs[],
                 std::uint32_t first_slot, std::size_t n, const Geometry& geometry, std::uint32_t crc_prefix);

RecordHeader LoadRecordHeader(const std::byte* record);
bool RecordIsIntact(const std::byte* record, std::uint32_t slot, const Geometry& geometry,
                    std::uint32_t crc_prefix);

}  // namespace tierstore
