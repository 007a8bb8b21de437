// Compaction: one thread that copies the newest versions out of segments that hold few of them, so that their
// space comes back. When space is short it serves the writer that waits; otherwise it keeps dead bytes below
// live ones.
#include <algorithm>

#include "common/call_limit.h"
#include "common/key.h"
#include "io/aligned_buffer.h"
#include "io/errors.h"
#include "store/store.h"

namespace tierstore {
namespace {

constexpr std::uint32_t kSlotsPerBatch = 256;
constexpr std::uint64_t kLowSpaceSegments = 3;  // compaction begins when no more than these fit
constexpr std::uint64_t kFreedTogether = 4;     // segments, by one renewal of the last commit
constexpr unsigned kMaxFailedReads = 3;         // of a segment, until it is taken for damaged

double LastingShare(const Segment& segment) {
  return static_cast<double>(segment.Lasting()) / static_cast<double>(segment.slots);
}

// Bytes that are free in the end when so many of its rows are copied, with their part of header and footer.
// Negative when copies take more.
std::int64_t Gain(const Segment& segment, std::uint32_t rows) {
  return static_cast<std::int64_t>(segment.reserved_bytes) -
         static_cast<std::int64_t>(segment.row_class->BytesOf(rows));
}

}  // namespace

void Store::WakeCompactor() {
  compactor_signal_ = true;
  compactor_work_.notify_one();
}

void Store::CompactLoop() {
  Lock lock(mutex_);
  while (!stop_) {
    compactor_signal_ = false;
    try {
      RemoveDoomed(lock);
      if (CompactOnce(lock)) continue;
      const auto is_being_written = [](const auto& entry) {
        return entry.second->sealed && !entry.second->chunks.empty();
      };
      if (doomed_.empty() && std::none_of(segments_.begin(), segments_.end(), is_being_written))
        ++fruitless_scans_;
    } catch (const Interrupted&) {
    } catch (...) {
      queue_.Report(std::current_exception());
    }
    space_.notify_all();
    compactor_work_.wait(lock, [this] { return stop_ || compactor_signal_; });
  }
}

// False when there is nothing to win.
bool Store::CompactOnce(Lock& lock) {
  const Survey survey = TakeSurvey();
  const Victim victim = PickVictim(survey);
  const std::uint64_t enough = (kLowSpaceSegments + kFreedTogether) * survey.unit;
  if (survey.released > 0 && IsShort(survey) && CanRenew() && gained_bytes_ > 0 &&
      (victim.segment == nullptr || survey.free + survey.released >= enough)) {
    RenewCommit(lock);
    return true;
  }
  if (victim.segment == nullptr) return false;
  CompactSegment(lock, victim);
  return true;
}

std::uint64_t Store::LargestSegment() const {
  std::uint64_t largest = 0;
  for (const auto& [row_bytes, row_class] : classes_)
    largest = std::max(largest, row_class->MaxSegmentBytes(true));
  return largest;
}

// What only compaction may use, so that it can always go on: a segment to copy to, and half of one more. For
// a victim gives back less than the new segment takes at first (footers), and several victims may be needed
// until what they give back is more.
std::uint64_t Store::SpaceReserve() const {
  const std::uint64_t largest = LargestSegment();
  return largest + largest / 2;
}

// Bytes of superseded rows that are tolerated: as many as live ones, which makes uniform overwrites cost
// about 1.26 times their bytes; fewer where a commit keeps them, since what replaces them must fit the cap
// too.
Store::Survey Store::TakeSurvey() const {
  Survey survey;
  for (const auto& [number, segment] : segments_) {
    if (IsReleased(*segment)) survey.released += segment->reserved_bytes;
    if (segment->retired) continue;
    const std::uint64_t record_bytes = segment->row_class->geometry.record_bytes;
    survey.live += segment->live * record_bytes;
    survey.dead += (segment->slots - segment->Lasting()) * record_bytes;
  }
  const std::uint64_t used = UsedBytes();
  survey.unit = LargestSegment();
  survey.free = used < cap_bytes_ ? cap_bytes_ - used : 0;
  survey.tolerated = survey.live;
  if (!commits_.empty()) {
    const std::uint64_t spare = cap_bytes_ > 2 * survey.live ? (cap_bytes_ - 2 * survey.live) / 2 : 0;
    survey.tolerated = std::clamp(spare, survey.live / 4, survey.live);
  }
  survey.tolerated += 2 * survey.unit;
  return survey;
}

bool Store::IsShort(const Survey& survey) const {
  return wanted_bytes_ > 0 || survey.free < kLowSpaceSegments * survey.unit;
}

Store::Victim Store::PickVictim(const Survey& survey) const {
  if (crowded_ != nullptr) {  // a place in the index is free as soon as no newest version is left
    if (const SegmentPtr victim = PickSparse(/*unpinned=*/false, crowded_)) return {victim, false};
  }
  if (IsShort(survey)) {
    if (const SegmentPtr victim = PickToFree()) return {victim, true};
  }
  const bool much_garbage =
      compact_all_ ? survey.dead * 10 > survey.live + survey.dead : survey.dead > survey.tolerated;
  if (!much_garbage) return {};
  // Relocating from a segment that a commit keeps takes space now and gives it back with a later commit.
  const SegmentPtr sparsest = survey.free < 2 * survey.unit ? nullptr : PickSparse(/*unpinned=*/false);
  if (sparsest != nullptr && LastingShare(*sparsest) <= 0.9) return {sparsest, false};
  return {PickSparse(/*unpinned=*/true), false};
}

// The segment that gives back most for the rows that must be copied, so that it can go at once.
SegmentPtr Store::PickToFree() const {
  SegmentPtr best;
  double best_share = 0;
  for (const auto& [number, segment] : segments_) {
    if (!segment->sealed || !segment->chunks.empty() || segment->damaged || segment->Needed() == 0) continue;
    const std::int64_t gain = Gain(*segment, segment->Needed());
    const double share = static_cast<double>(gain) / static_cast<double>(segment->reserved_bytes);
    if (share < 0.05 || share <= best_share) continue;
    if (!MayRelease(*segment) || !CanRelocate(*segment, segment->Needed())) continue;
    best = segment;
    best_share = share;
  }
  return best;
}

// The segment with the smallest share of lasting rows.
SegmentPtr Store::PickSparse(bool unpinned, const RowClass* only) const {
  SegmentPtr best;
  for (const auto& [number, segment] : segments_) {
    if (segment->retired || !segment->sealed || !segment->chunks.empty() || segment->damaged) continue;
    if ((unpinned && segment->pins > 0) || (only != nullptr && segment->row_class != only)) continue;
    if ((segment->slots - segment->Lasting()) * 32 < segment->slots || !CanRelocate(*segment, segment->live))
      continue;
    if (best == nullptr || LastingShare(*segment) < LastingShare(*best)) best = segment;
  }
  return best;
}

// There is room for copies of so many of its rows.
bool Store::CanRelocate(const Segment& victim, std::uint32_t rows) const {
  const RowClass& row_class = *victim.row_class;
  std::uint64_t bytes = 0, ordinals = 0;
  const auto add = [&](Stream stream) {
    const SegmentPtr& target = row_class.active[stream];
    if (target != nullptr && row_class.slots_per_segment - target->slots >= rows) return;
    bytes += row_class.MaxSegmentBytes(true);
    ++ordinals;
  };
  if (victim.CommittedSlots() > 0) add(kOfCommit);
  if (victim.CommittedSlots() < victim.slots) add(kSinceCommit);
  return bytes == 0 || (UsedBytes() + bytes <= cap_bytes_ && ordinals <= row_class.FreeOrdinals());
}

void Store::CompactSegment(Lock& lock, const Victim& victim) {
  Segment& segment = *victim.segment;
  const RowClass& row_class = *segment.row_class;
  const std::uint32_t step = row_class.slots_per_chunk, slots = segment.slots;
  const auto left = [&] { return victim.with_kept ? segment.Needed() : segment.live; };
  gained_bytes_ += Gain(segment, left());
  AlignedBuffer buffer(row_class.chunk_bytes);
  // What seems damaged is read once more: it may have been so on the way only.
  for (int pass = 0; pass < 2 && left() > 0; ++pass) {
    for (std::uint32_t first = 0; first < slots && left() > 0 && !stop_; first += step) {
      const std::uint32_t last = std::min(slots, first + step);
      ReadVictim(lock, segment, first, last, buffer.data());
      RelocateRecords(lock, victim, buffer.data(), first, last);
    }
  }
  DoomIfUnneeded(victim.segment);
  if (left() == 0 || stop_) return;
  segment.damaged = true;
  throw CorruptError(
      segment.path + ": compaction found " + std::to_string(left()) +
      " rows damaged (checksum or key mismatch) and left them; the others are safe elsewhere. Reading a "
      "damaged row names it");
}

// Reads slots first to last. Only what the device says of these very bytes counts against the segment:
// memory, descriptors or space may be short for a moment, and errors of the target are none of it.
void Store::ReadVictim(Lock& lock, Segment& victim, std::uint32_t first, std::uint32_t last,
                       std::byte* data) {
  const Geometry& geometry = victim.row_class->geometry;
  const std::uint64_t offset = geometry.Offset(first), size = geometry.EndOffset(last) - offset;
  std::size_t got = 0;
  try {
    const Unlocked unlocked(lock);
    got = victim.file->Read(offset, data, size);
  } catch (const IoError& error) {
    const bool of_device = error.code() == EIO || error.code() == EBADMSG || error.code() == EUCLEAN;
    if (of_device && ++victim.failed_reads == kMaxFailedReads) victim.damaged = true;
    throw;
  }
  victim.failed_reads = 0;
  if (got == size) return;
  victim.damaged = true;
  throw CorruptError(victim.path + ": the file ends at offset " + std::to_string(offset + got) +
                     ", within its rows");
}

// Slots first to last of the victim, whose bytes `data` holds.
void Store::RelocateRecords(Lock& lock, const Victim& chosen, const std::byte* data, std::uint32_t first,
                            std::uint32_t last) {
  Segment& victim = *chosen.segment;
  RowClass& row_class = *victim.row_class;
  const Geometry& geometry = row_class.geometry;
  const auto record_of = [&](std::uint32_t slot) {
    return data + (geometry.Offset(slot) - geometry.Offset(first));
  };
  const auto is_newest = [&](std::uint32_t slot) {
    if (victim.retired) return false;
    const std::uint64_t key = LoadRecordHeader(record_of(slot)).key;
    Table* table = FindTable(KeyTable(key));
    return table != nullptr && table->row_class == &row_class &&
           table->index.Find(key) == row_class.Location(victim, slot);
  };
  const auto is_needed = [&](std::uint32_t slot) {
    return is_newest(slot) || (chosen.with_kept && victim.IsKept(slot));
  };
  std::vector<std::uint32_t> slots;
  for (std::uint32_t slot = first; slot < last; ++slot) {
    if (slot % kSlotsPerBatch == 0) GiveWay(lock);
    if (is_needed(slot) && RecordIsIntact(record_of(slot), slot, geometry, victim.crc_prefix))
      slots.push_back(slot);
  }
  std::uint64_t keys[kSlotsPerBatch], newest_keys[kSlotsPerBatch];
  std::uint32_t epochs[kSlotsPerBatch], newest_locations[kSlotsPerBatch], kept[kSlotsPerBatch];
  std::byte* records[kSlotsPerBatch];
  for (std::size_t at = 0; at < slots.size();) {
    GiveWay(lock);
    compaction_resumed_.wait(lock, [this] { return stop_ || !compaction_held_; });
    // Overwritten while the mutex was free, some of them.
    if (!is_needed(slots[at])) {
      ++at;
      continue;
    }
    const bool committed = slots[at] < victim.CommittedSlots();
    std::size_t end = at + 1;
    while (end < slots.size() && end - at < kSlotsPerBatch &&
           (slots[end] < victim.CommittedSlots()) == committed)
      ++end;
    const Span span =
        Reserve(lock, row_class, committed ? kOfCommit : kSinceCommit, static_cast<std::uint32_t>(end - at));
    // A commit that was made during the wait holds all of them.
    if (compaction_held_ || (slots[at] < victim.CommittedSlots()) != committed) continue;
    std::uint32_t n = 0, newest = 0, others = 0;
    LocateRecords(span, records);
    for (std::uint32_t i = 0; i < span.count; ++i) {
      const std::uint32_t slot = slots[at + i];
      const bool is_live = is_newest(slot);
      if (!is_live && !is_needed(slot)) continue;
      const RecordHeader header = LoadRecordHeader(record_of(slot));
      keys[n] = header.key;
      epochs[n] = header.epoch;
      std::memcpy(records[n], record_of(slot), geometry.record_bytes);
      if (is_live) {
        newest_keys[newest] = header.key;
        newest_locations[newest++] = row_class.Location(*span.segment, span.first + n);
      } else {
        victim.Unkeep(slot);
        kept[others++] = span.first + n;
      }
      ++n;
    }
    SealRecords(records, keys, epochs, span.first, n, geometry, span.segment->crc_prefix);
    Advance(span, n, keys, epochs);
    span.segment->live -= others;
    for (std::uint32_t i = 0; i < others; ++i) span.segment->Keep(kept[i]);
    Put(newest_keys, newest_locations, newest, row_class, /*relocated=*/true);
    relocated_rows_ += n;
    at += span.count;
  }
}

// Those that are being read go later: a read opens its files when it comes to them.
void Store::RemoveDoomed(Lock& lock) {
  constexpr int kOwnReferences = 2;  // of segments_ and of this function
  std::vector<SegmentPtr> read;
  removal_waits_ = !doomed_.empty();  // before the references are counted, so that no read's end is missed
  while (!doomed_.empty()) {
    const SegmentPtr segment = doomed_.back();
    doomed_.pop_back();
    if (segment.use_count() > kOwnReferences) {
      read.push_back(segment);
      continue;
    }
    std::exception_ptr error;
    try {
      const Unlocked unlocked(lock);
      env_.Remove(segment->path);
    } catch (...) {
      error = std::current_exception();
    }
    if (error != nullptr) {
      queue_.Report(error);  // the bytes stay counted
      continue;
    }
    reserved_bytes_ -= segment->reserved_bytes;
    segments_.erase(segment->number);
    space_.notify_all();
  }
  removal_waits_ = !read.empty();
  doomed_.insert(doomed_.end(), read.begin(), read.end());
}

void Store::Compact() {
  const auto call = BeginCall();
  CheckWritable();
  Lock lock(mutex_);
  queue_.ThrowPending();
  compact_all_ = true;
  const std::uint64_t scans = fruitless_scans_;
  WakeCompactor();
  try {
    WaitInCall(space_, lock, [&] { return stop_ || queue_.HasError() || fruitless_scans_ > scans; });
  } catch (const CallEnded&) {
    compact_all_ = false;
    throw;
  }
  compact_all_ = false;
  queue_.ThrowPending();
}

}  // namespace tierstore
