#include "store/compactor.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/key.h"
#include "io/aligned_buffer.h"
#include "io/errors.h"
#include "store/errors.h"

namespace tierstore {
namespace {

constexpr std::uint32_t kSlotsPerBatch = 256;
constexpr unsigned kMaxFailedReads = 3;  // of a segment, until it is taken for damaged

}  // namespace

// A Batch is the slots from `first` to `last` of a victim; `data` holds their bytes.
struct Compactor::Batch {
  const Victim& chosen;
  const std::byte* data;
  std::uint32_t first, last;

  Segment& victim() const { return *chosen.segment; }
  const std::byte* RecordOf(std::uint32_t slot) const {
    const Geometry& geometry = victim().row_class->geometry;
    return data + (geometry.Offset(slot) - geometry.Offset(first));
  }
};

void Compactor::Run() {
  Lock lock(mutex_);
  while (!control_.stopped()) {
    control_.BeginScan();
    try {
      state_.segments.RemoveDoomed(lock, queue_);
      if (CompactOnce(lock)) continue;
      if (!state_.segments.HasDoomed() && !state_.segments.AnyBeingWritten()) control_.CountFruitlessScan();
    } catch (const Interrupted&) {
    } catch (...) {
      queue_.Report(std::current_exception());
    }
    control_.NotifyProgress();
    control_.WaitForWork(lock);
  }
}

// Returns false when there is nothing to win.
bool Compactor::CompactOnce(Lock& lock) {
  const Survey survey = state_.space.TakeSurvey();
  const Victim victim = victims_.Pick(survey);
  if (survey.released > 0 && victims_.IsShort(survey) && committer_.CanRenew() && gain_.bytes() > 0 &&
      (victim.segment == nullptr || VictimPicker::IsEnough(survey))) {
    RenewCommit(lock);
    return true;
  }
  if (victim.segment == nullptr) return false;
  CompactSegment(lock, victim);
  return true;
}

void Compactor::RenewCommit(Lock& lock) {
  // Bytes that stay unfilled so that a block ends there must be won first next time, or renewing and
  // compacting could go on for ever.
  gain_.Reset(-static_cast<std::int64_t>(kBlockBytes));
  for (const auto& [row_bytes, row_class] : state_.rows.classes()) {
    for (const Stream stream : {kOfCommit, kSinceCommit}) {
      const SegmentPtr segment = row_class->active[stream];
      if (segment == nullptr) continue;
      const std::uint32_t slots = segment->slots;
      appender_.Flush(segment);
      gain_.Subtract(segment->BytesOfCopies(segment->slots - slots));
    }
  }
  committer_.Renew(lock);
}

void Compactor::CompactSegment(Lock& lock, const Victim& victim) {
  Segment& segment = *victim.segment;
  const RowClass& row_class = *segment.row_class;
  const std::uint32_t step = row_class.slots_per_chunk, slots = segment.slots;
  gain_.Count(victim, state_.segments.by_number());
  AlignedBuffer buffer(row_class.chunk_bytes);
  // Records that seem damaged are read once more: their bytes may have changed only on the way.
  for (int pass = 0; pass < 2 && victim.Left() > 0; ++pass) {
    for (std::uint32_t first = 0; first < slots && victim.Left() > 0 && !control_.stopped(); first += step) {
      const std::uint32_t last = std::min(slots, first + step);
      ReadVictim(lock, segment, first, last, buffer.data());
      Relocate(lock, {victim, buffer.data(), first, last});
    }
  }
  state_.segments.DoomIfUnneeded(victim.segment);
  if (victim.Left() == 0 || control_.stopped()) return;
  segment.damaged = true;
  throw CorruptError(
      segment.path + ": compaction found " + std::to_string(victim.Left()) +
      " damaged rows (checksum or key mismatch) and left these rows there; all other rows were copied. "
      "`tierstore verify` names the damaged rows and says what to do");
}

// Reads slots first to last. Only errors of the device for these very bytes count against the segment:
// memory, descriptors or space may be short for a moment, and the target's errors do not concern this
// segment.
void Compactor::ReadVictim(Lock& lock, Segment& victim, std::uint32_t first, std::uint32_t last,
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

// Looks up to kSlotsPerBatch slots up together, since most of the time of one look-up goes by waiting for
// memory.
void Compactor::FindNewest(const Batch& batch, std::span<const std::uint32_t> slots, bool* newest) const {
  const Segment& victim = batch.victim();
  const RowClass& row_class = *victim.row_class;
  std::uint64_t keys[kSlotsPerBatch] = {};
  Location locations[kSlotsPerBatch];
  for (std::size_t i = 0; i < slots.size(); ++i) keys[i] = LoadRecordHeader(batch.RecordOf(slots[i])).key;
  state_.rows.Find(keys, slots.size(), locations, &row_class);
  for (std::size_t i = 0; i < slots.size(); ++i)
    newest[i] = !victim.retired && locations[i] == row_class.LocationOf(victim, slots[i]);
}

bool Compactor::IsKept(const Batch& batch, std::uint32_t slot) const {
  return batch.chosen.with_kept && batch.victim().IsKept(slot);
}

bool Compactor::IsNeeded(const Batch& batch, std::uint32_t slot) const {
  bool newest;
  FindNewest(batch, {&slot, 1}, &newest);
  return newest || IsKept(batch, slot);
}

// Returns the slots of the batch that are needed and intact.
std::vector<std::uint32_t> Compactor::FindNeeded(Lock& lock, const Batch& batch) {
  const Segment& victim = batch.victim();
  std::uint32_t some[kSlotsPerBatch];
  bool newest[kSlotsPerBatch];
  std::vector<std::uint32_t> slots;
  for (std::uint32_t first = batch.first; first < batch.last; first += kSlotsPerBatch) {
    mutex_.GiveWay(lock);
    const std::uint32_t n = std::min(kSlotsPerBatch, batch.last - first);
    std::iota(some, some + n, first);
    FindNewest(batch, {some, n}, newest);
    for (std::uint32_t i = 0; i < n; ++i) {
      if ((newest[i] || IsKept(batch, some[i])) &&
          RecordIsIntact(batch.RecordOf(some[i]), some[i], victim.row_class->geometry, victim.crc_prefix))
        slots.push_back(some[i]);
    }
  }
  return slots;
}

void Compactor::Relocate(Lock& lock, const Batch& batch) {
  const Segment& victim = batch.victim();
  const std::vector<std::uint32_t> slots = FindNeeded(lock, batch);
  for (std::size_t at = 0; at < slots.size();) {
    mutex_.GiveWay(lock);
    if (control_.stopped()) return;
    // The row may have been overwritten while the mutex was free.
    if (!IsNeeded(batch, slots[at])) {
      ++at;
      continue;
    }
    const bool committed = slots[at] < victim.CommittedSlots();
    std::size_t end = at + 1;
    while (end < slots.size() && end - at < kSlotsPerBatch &&
           (slots[end] < victim.CommittedSlots()) == committed)
      ++end;
    const Span span = appender_.Reserve(lock, *victim.row_class, committed ? kOfCommit : kSinceCommit,
                                        static_cast<std::uint32_t>(end - at));
    // A commit that was made during the wait holds all of these rows.
    if ((slots[at] < victim.CommittedSlots()) != committed) continue;
    Copy(batch, &slots[at], span);
    at += span.count;
  }
}

// Copies the span's count of slots, except slots that are not needed any more.
void Compactor::Copy(const Batch& batch, const std::uint32_t* slots, const Span& span) {
  Segment& victim = batch.victim();
  RowClass& row_class = *victim.row_class;
  const Geometry& geometry = row_class.geometry;
  std::uint64_t keys[kSlotsPerBatch], newest_keys[kSlotsPerBatch];
  Location newest_locations[kSlotsPerBatch];
  std::uint32_t epochs[kSlotsPerBatch], kept[kSlotsPerBatch];
  std::byte* records[kSlotsPerBatch];
  bool is_newest[kSlotsPerBatch];
  std::uint32_t n = 0, newest = 0, others = 0;
  span.LocateRecords(records);
  FindNewest(batch, {slots, span.count}, is_newest);
  for (std::uint32_t i = 0; i < span.count; ++i) {
    if (!is_newest[i] && !IsKept(batch, slots[i])) continue;
    const std::byte* const record = batch.RecordOf(slots[i]);
    const RecordHeader header = LoadRecordHeader(record);
    keys[n] = header.key;
    epochs[n] = header.epoch;
    std::memcpy(records[n], record, geometry.record_bytes);
    if (is_newest[i]) {
      newest_keys[newest] = header.key;
      newest_locations[newest++] = row_class.LocationOf(*span.segment, span.first + n);
    } else {
      victim.Unkeep(slots[i]);
      kept[others++] = span.first + n;
    }
    ++n;
  }
  SealRecords(records, keys, epochs, span.first, n, geometry, span.segment->crc_prefix);
  appender_.Advance(span, n, keys, epochs);
  span.segment->AddLive(-std::int64_t{others});
  for (std::uint32_t i = 0; i < others; ++i) span.segment->Keep(kept[i]);
  state_.rows.Put(newest_keys, newest_locations, newest, row_class, /*relocated=*/true);
  relocated_rows_ += n;
}

}  // namespace tierstore
