// Segments in memory have a state, and chunks of rows that are not yet in their file.
//
// The store's mutex guards every member that does not say otherwise.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io/aligned_buffer.h"
#include "io/env.h"
#include "store/footer.h"
#include "store/format.h"
#include "store/index.h"

namespace tierstore {

// A Chunk is a stretch of a segment's file in memory. Its bytes from `begin` on are valid up to `filled`;
// bytes up to `queued` are on their way to the file and no longer change; bytes up to `written` are in the
// file.
struct Chunk {
  // The usual size of a chunk. A chunk has whole frames, so no record is in two chunks.
  static constexpr std::size_t kBytes = 2 * kMaxFrameBytes;

  AlignedBuffer buffer;
  std::uint64_t offset = 0;  // in the file
  std::size_t begin = 0, filled = 0, queued = 0, written = 0;
  std::function<Bytes()> encode;  // gives the bytes, when there is no buffer; called without the mutex
  bool pooled = false;            // the buffer goes back to the queue's spares
  bool last = false;              // nothing will be added
};

struct RowClass;

// Counts has numbers of slots of segments that are not retired.
struct Counts {
  std::uint64_t slots = 0, live = 0;
  std::uint64_t kept = 0;  // rows in segments that are not older than the interval

  // Returns the number of slots whose rows are superseded, without the rows that last (Segment::Lasting).
  std::uint64_t Dead() const { return slots - live - kept; }
  bool operator==(const Counts&) const = default;
};

// The kinds of rows that are appended: each row size has one active segment for each kind.
enum Stream : unsigned {
  kFromCallers,
  kOfCommit,     // copies of rows of the last commit only
  kSinceCommit,  // copies of newer rows
};
inline constexpr std::size_t kStreams = 3;

struct Segment {
  // Counters that change with every superseded row, in one cache line. The last commit needs rows that were
  // superseded since: compaction can copy these rows too, and the commit can be written anew to name the
  // copies (Committer::Renew).
  std::uint32_t slots = 0;               // used, voids included
  std::uint32_t live = 0;                // rows whose newest version is here
  std::uint32_t kept = 0;                // rows superseded since the last commit that it needs
  std::uint32_t committed_slots = 0;     // leading slots that hold nothing newer than that commit
  std::vector<std::uint64_t> kept_bits;  // by slot, once there is one
  Stream stream = kFromCallers;
  bool older = false;           // older than the interval since the last commit
  bool in_last_commit = false;  // named by the last commit

  std::uint32_t number = 0;
  std::uint32_t capacity = 0;  // slots that it may come to have
  bool relocated = false;
  RowClass* row_class = nullptr;
  std::uint32_t ordinal = 0;  // in row_class->segments
  std::uint32_t crc_prefix = 0;
  std::unique_ptr<File> file;  // safe to use without the mutex; null for one that only old commits name
  std::string path;

  std::uint32_t durable_slots = 0;  // slots that the next commit may name
  std::uint32_t flushed_slots = 0;  // `slots` after the last flush
  std::uint32_t pins = 0;           // kept commits that name it, and a commit under way
  std::uint32_t pinned_slots = 0;   // the most that a kept commit names; found when opening
  bool sealed = false;
  bool retired = false;              // holds no newest version; waits for its pins to go
  bool unsynced = false;             // written to since the last sync
  bool doomed = false;               // in line to be removed
  bool being_written = false;        // sealed, and in part still in memory
  bool damaged = false;              // compaction met a damaged record here; not tried again
  unsigned failed_reads = 0;         // of compaction; after some the segment counts as damaged
  std::uint64_t reserved_bytes = 0;  // what it counts against the cap
  std::uint64_t released_bytes = 0;  // the part of them that SegmentSet::released_bytes counts
  std::uint64_t file_bytes = 0;      // bytes that are written

  std::vector<std::shared_ptr<Chunk>> chunks;  // ascending offsets
  Footer footer;                               // collected until the segment is sealed

  std::uint32_t CommittedSlots() const { return stream == kOfCommit ? slots : committed_slots; }
  bool IsKept(std::uint32_t slot) const { return kept > 0 && (kept_bits[slot / 64] >> slot % 64 & 1) != 0; }
  // Keeps the row at `slot`, which is superseded, for the last commit; or forgets that it is kept.
  void Keep(std::uint32_t slot);
  void Unkeep(std::uint32_t slot);
  // Notes that the interval since the last commit begins anew, or that the segment holds no newest version
  // any more.
  void BeginInterval();
  void Retire();
  // Changes `slots` and `live`, and the counts of the row class.
  void AddSlots(std::uint32_t n);
  void AddLive(std::int64_t n);
  Counts Count() const { return retired ? Counts{} : Counts{slots, live, older ? 0 : kept}; }
  // Returns the rows without which the segment can go, also from the last commit.
  std::uint32_t Needed() const { return live + kept; }
  // Returns the rows that compaction copies when space is not short. Rows that only the last commit keeps
  // stay in the segment, since the next commit drops them. Rows that were copied since the commit do not
  // stay: their segment would be taken apart again and again.
  std::uint32_t Lasting() const { return older ? live : Needed(); }
  // Returns whether only the last commit names the segment, and needs no row of it.
  bool IsReleased() const { return retired && kept == 0 && pins == 1 && in_last_commit; }
  // Returns whether the segment is written whole and no longer in memory, so that compaction can read it from
  // its file.
  bool IsComplete() const { return sealed && chunks.empty(); }
  SegmentHeader Header(const StoreId& store) const;
  // Returns the bytes of copies of this many of its rows, with their part of header and footer.
  std::uint64_t BytesOfCopies(std::uint32_t rows) const;

  // Returns the chunk that records are appended to; nullptr when there is none, because nothing is appended
  // yet or the last chunk is full and closed. `chunks` then still holds what is being written, or nothing.
  std::shared_ptr<Chunk> OpenChunk() const {
    return chunks.empty() || chunks.back()->last ? nullptr : chunks.back();
  }

  // Returns the chunk whose valid bytes hold this offset, or nullptr when the bytes are in the file.
  const Chunk* ChunkAt(std::uint64_t at) const {
    for (const auto& chunk : chunks) {
      if (at >= chunk->offset + chunk->begin && at < chunk->offset + chunk->filled) return chunk.get();
    }
    return nullptr;
  }
};

using SegmentPtr = std::shared_ptr<Segment>;

// All segments of one row size. A location in the index is ordinal << slot_bits | slot.
struct RowClass {
  Geometry geometry;
  std::uint32_t slots_per_segment = 0;  // of the next one
  unsigned slot_bits = 0;               // fixed once there are locations
  std::uint32_t slots_per_chunk = 0;
  std::size_t chunk_bytes = 0;
  std::vector<SegmentPtr> segments;         // by ordinal; null where free
  SegmentPtr active[kStreams];              // appended to
  std::vector<std::uint64_t> first_places;  // of each ordinal (PlaceOf)
  std::uint64_t next_place = 0;
  std::uint64_t max_ordinals = 0, used_ordinals = 0;
  std::uint64_t changes = 0;  // of `segments`
  Counts counts;

  // New segments take at most this many bytes, but at least a frame.
  void GrowSegments(std::uint64_t bytes) {
    slots_per_segment = std::max(slots_per_segment, geometry.SlotsIn(bytes));
  }
  // Sets the bits of a slot, at least this many, for a store with this many locations.
  void SetSlotBits(unsigned bits, std::uint64_t locations) {
    slot_bits = std::max(slot_bits, bits);
    max_ordinals = locations >> slot_bits;
  }
  std::uint64_t FreeOrdinals() const {
    return max_ordinals > used_ordinals ? max_ordinals - used_ordinals : 0;
  }

  // Returns whether there is a place for a segment of callers, besides the segments that compaction copies
  // to.
  bool HasOrdinalForCallers() const { return FreeOrdinals() >= kStreams; }
  // Gives the segment the first free ordinal, or (cheaper) an ordinal behind all other segments.
  void AddSegment(const SegmentPtr& segment);
  void AppendSegment(const SegmentPtr& segment);
  // Frees the segment's ordinal.
  void RemoveSegment(const Segment& segment) {
    segments[segment.ordinal].reset();
    --used_ordinals;
    ++changes;
  }

  Location LocationOf(const Segment& segment, std::uint32_t slot) const {
    return Location{segment.ordinal} << slot_bits | slot;
  }
  // Returns a number that grows with locations, but without gaps where slot bits leave room for larger
  // segments: a reader that goes through all places in equal steps then finds rows at each of them. An
  // ordinal keeps its places; where a larger segment takes the ordinal, the last places are the next
  // ordinal's, too.
  std::uint64_t PlaceOf(Location location) const {
    return first_places[location >> slot_bits] + SlotOf(location);
  }
  const SegmentPtr& SegmentOf(Location location) const { return segments[location >> slot_bits]; }
  std::uint32_t SlotOf(Location location) const {
    return static_cast<std::uint32_t>(location) & ((1u << slot_bits) - 1);
  }
  // Returns the bytes of this many copies with their part of the header, and with as much of a footer for
  // each.
  std::uint64_t BytesOf(std::uint32_t slots, std::uint64_t footer_bits) const {
    return geometry.EndOffset(slots_per_segment) * slots / slots_per_segment + slots * footer_bits / 8;
  }
  std::uint64_t MaxSegmentBytes(bool relocated) const {
    return geometry.EndOffset(slots_per_segment) + Footer::MostBytes(slots_per_segment, relocated);
  }
};

inline void Segment::AddSlots(std::uint32_t n) {
  slots += n;
  row_class->counts.slots += n;
}

inline void Segment::AddLive(std::int64_t n) {
  live += static_cast<std::uint32_t>(n);
  row_class->counts.live += static_cast<std::uint64_t>(n);
}

inline void Segment::Unkeep(std::uint32_t slot) {
  kept_bits[slot / 64] &= ~(std::uint64_t{1} << slot % 64);
  --kept;
  if (!older && !retired) --row_class->counts.kept;
}

inline void Segment::Keep(std::uint32_t slot) {
  if (slot >= CommittedSlots()) return;  // the last commit does not hold it
  if (kept == 0) kept_bits.assign(capacity / 64 + 1, 0);
  kept_bits[slot / 64] |= std::uint64_t{1} << slot % 64;
  ++kept;
  if (!older) ++row_class->counts.kept;
}

// Returns the keys (and, of copies, the epochs) of the segment's slots, and which slots are voids. They come
// from the footer or, where no footer is valid, from the records of the slots from `first_slot` on; the keys
// of earlier slots may then be missing (0). Throws CorruptError when one of these records is damaged,
// IoError, CallEnded.
Footer LoadKeys(const Segment& segment, const StoreId& store, std::uint32_t first_slot);

}  // namespace tierstore
