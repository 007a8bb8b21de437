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

double LiveShare(const Segment& segment) {
  return static_cast<double>(segment.live) / static_cast<double>(segment.slots);
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
    RemoveDoomed(lock);
    if (const SegmentPtr victim = PickVictim()) {
      try {
        CompactSegment(lock, victim);
        continue;
      } catch (const Interrupted&) {
      } catch (const IoError& error) {
        if (!error.IsFull()) victim->damaged = true;
        queue_.Report(std::current_exception());
      } catch (...) {
        victim->damaged = true;
        queue_.Report(std::current_exception());
      }
    } else {
      const auto is_being_written = [](const auto& entry) {
        return entry.second->sealed && !entry.second->chunks.empty();
      };
      if (doomed_.empty() && std::none_of(segments_.begin(), segments_.end(), is_being_written))
        ++fruitless_scans_;
    }
    space_.notify_all();
    compactor_work_.wait(lock, [this] { return stop_ || compactor_signal_; });
  }
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
// about 1.26 times their bytes. Where commits keep segments, what they keep and what replaces it must both
// fit the cap.
Store::Survey Store::TakeSurvey() const {
  Survey survey;
  for (const auto& [number, segment] : segments_) {
    if (segment->retired) {
      if (segment->pins > 0) survey.deferred += segment->reserved_bytes;
      continue;
    }
    const std::uint64_t record_bytes = segment->row_class->geometry.record_bytes;
    survey.live += segment->live * record_bytes;
    survey.dead += (segment->slots - segment->live) * record_bytes;
  }
  const std::uint64_t used = UsedBytes();
  survey.unit = LargestSegment();
  survey.free = used < config_.cap_bytes ? config_.cap_bytes - used : 0;
  survey.low = kLowSpaceSegments * survey.unit;
  survey.tolerated = survey.live;
  if (!commits_.empty()) {
    // To win a byte compaction moves 1 / (dead share) - 1 others, or fewer where dead rows are unevenly
    // spread.
    const double dead_share =
        static_cast<double>(survey.dead + 1) / static_cast<double>(survey.live + survey.dead + 1);
    survey.demand = static_cast<std::uint64_t>(
        std::min(1.25 * static_cast<double>(commit_interval_) / dead_share,
                 0.5 * static_cast<double>(survey.free + survey.deferred + survey.dead)));
    const std::uint64_t spare =
        config_.cap_bytes > 2 * survey.live ? (config_.cap_bytes - 2 * survey.live) / 2 : 0;
    survey.tolerated = std::clamp(spare, survey.live / 4, survey.live);
  }
  survey.tolerated += 2 * survey.unit;
  return survey;
}

SegmentPtr Store::PickVictim() {
  SegmentPtr best, best_unpinned;
  for (const auto& [number, segment] : segments_) {
    if (segment->retired || !segment->sealed || !segment->chunks.empty() || segment->damaged) continue;
    if ((segment->slots - segment->live) * 32 < segment->slots || !CanRelocate(*segment)) continue;
    if (best == nullptr || LiveShare(*segment) < LiveShare(*best)) best = segment;
    if (segment->pins > 0) continue;
    if (best_unpinned == nullptr || LiveShare(*segment) < LiveShare(*best_unpinned)) best_unpinned = segment;
  }
  const Survey survey = TakeSurvey();
  const bool much_garbage =
      compact_all_ ? survey.dead * 10 > survey.live + survey.dead : survey.dead > survey.tolerated;
  // Relocating from a segment that a commit keeps takes space now and gives it back with a later commit.
  if (best != nullptr && survey.free >= 2 * survey.unit && (much_garbage || survey.LacksAfterCommit()) &&
      LiveShare(*best) <= 0.9) {
    return best;
  }
  return survey.free < survey.low || wanted_bytes_ > 0 || much_garbage ? best_unpinned : nullptr;
}

bool Store::CanRelocate(const Segment& victim) const {
  const RowClass& row_class = *victim.row_class;
  const SegmentPtr& target = row_class.active[1];
  if (target != nullptr && row_class.slots_per_segment - target->slots >= victim.live) return true;
  return UsedBytes() + row_class.MaxSegmentBytes(true) <= config_.cap_bytes;
}

void Store::CompactSegment(Lock& lock, const SegmentPtr& victim) {
  const RowClass& row_class = *victim->row_class;
  const Geometry geometry = row_class.geometry;
  const std::uint32_t step = row_class.slots_per_chunk, slots = victim->slots;
  AlignedBuffer buffer(Chunk::kBytes);
  for (std::uint32_t first = 0; first < slots && victim->live > 0 && !stop_; first += step) {
    const std::uint32_t last = std::min(slots, first + step);
    const std::uint64_t offset = geometry.Offset(first), size = geometry.EndOffset(last) - offset;
    std::size_t got = 0;
    {
      const Unlocked unlocked(lock);
      got = victim->file->Read(offset, buffer.data(), size);
    }
    if (got != size) {
      throw CorruptError(victim->path + ": the file ends at offset " + std::to_string(offset + got) +
                         ", within its rows");
    }
    RelocateRecords(lock, victim, buffer.data(), first, last);
  }
  if (victim->live == 0 || stop_) return;
  victim->damaged = true;
  throw CorruptError(
      victim->path + ": compaction found " + std::to_string(victim->live) +
      " rows damaged (checksum or key mismatch) and left them; the others are safe elsewhere. Reading a "
      "damaged row names it");
}

// Slots first to last of the victim, whose bytes `data` holds.
void Store::RelocateRecords(Lock& lock, const SegmentPtr& victim, const std::byte* data, std::uint32_t first,
                            std::uint32_t last) {
  RowClass& row_class = *victim->row_class;
  const Geometry& geometry = row_class.geometry;
  const auto record_of = [&](std::uint32_t slot) {
    return data + (geometry.Offset(slot) - geometry.Offset(first));
  };
  const auto is_newest = [&](std::uint32_t slot) {
    const std::uint64_t key = LoadRecordHeader(record_of(slot)).key;
    Table* table = FindTable(KeyTable(key));
    return table != nullptr && table->row_class == &row_class &&
           table->index.Find(key) == row_class.Location(*victim, slot);
  };
  std::uint64_t keys[kSlotsPerBatch];
  std::uint32_t epochs[kSlotsPerBatch], locations[kSlotsPerBatch];
  std::byte* records[kSlotsPerBatch];
  std::vector<std::uint32_t> slots;
  for (std::uint32_t slot = first; slot < last; ++slot) {
    if (slot % kSlotsPerBatch == 0) GiveWay(lock);
    if (is_newest(slot) && RecordIsIntact(record_of(slot), slot, geometry, victim->crc_prefix))
      slots.push_back(slot);
  }
  for (std::size_t at = 0; at < slots.size() && !victim->retired;) {
    const auto want = static_cast<std::uint32_t>(std::min<std::size_t>(slots.size() - at, kSlotsPerBatch));
    GiveWay(lock);
    compaction_resumed_.wait(lock, [this] { return stop_ || !compaction_held_; });
    const Span span = Reserve(lock, row_class, true, want);
    if (compaction_held_) continue;
    std::uint32_t n = 0;
    LocateRecords(span, records);
    for (std::uint32_t i = 0; i < span.count; ++i) {
      const std::uint32_t slot = slots[at + i];
      if (!is_newest(slot)) continue;  // overwritten while the mutex was free
      const RecordHeader header = LoadRecordHeader(record_of(slot));
      keys[n] = header.key;
      epochs[n] = header.epoch;
      locations[n] = row_class.Location(*span.segment, span.first + n);
      std::memcpy(records[n], record_of(slot), geometry.record_bytes);
      ++n;
    }
    SealRecords(records, keys, epochs, span.first, n, geometry, span.segment->crc_prefix);
    Advance(span, n, keys, epochs);
    Put(keys, locations, n, row_class);
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
