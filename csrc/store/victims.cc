#include "store/victims.h"

namespace tierstore {
namespace {

constexpr std::uint64_t kLowSpaceSegments = 3;  // compaction begins when no more than these fit
constexpr std::uint64_t kFreedTogether = 4;     // segments, by one renewal of the last commit

double LastingShare(const Segment& segment) {
  return static_cast<double>(segment.Lasting()) / static_cast<double>(segment.slots);
}

}  // namespace

std::int64_t Gain(const Segment& segment, std::uint32_t rows) {
  return static_cast<std::int64_t>(segment.reserved_bytes) -
         static_cast<std::int64_t>(segment.BytesOfCopies(rows));
}

bool VictimPicker::IsShort(const Survey& survey) const {
  return control_.demand().bytes > 0 || survey.free < kLowSpaceSegments * survey.unit;
}

bool VictimPicker::IsEnough(const Survey& survey) {
  return survey.free + survey.released >= (kLowSpaceSegments + kFreedTogether) * survey.unit;
}

Victim VictimPicker::Pick(const Survey& survey) const {
  const CompactionDemand& demand = control_.demand();
  if (demand.crowded != nullptr) {  // a place in the index is free as soon as no newest version is left
    if (const SegmentPtr victim = PickSparse(/*unpinned=*/false, demand.crowded)) return {victim, false};
  }
  if (IsShort(survey)) {
    if (const SegmentPtr victim = PickToFree()) return {victim, true};
  }
  const bool much_garbage =
      demand.all ? survey.dead * 10 > survey.live + survey.dead : survey.dead > survey.tolerated;
  if (!much_garbage) return {};
  // Relocating from a segment that a commit keeps takes space now, which a later commit gives back.
  const SegmentPtr sparsest = survey.free < 2 * survey.unit ? nullptr : PickSparse(/*unpinned=*/false);
  if (sparsest != nullptr && LastingShare(*sparsest) <= 0.9) return {sparsest, false};
  return {PickSparse(/*unpinned=*/true), false};
}

SegmentPtr VictimPicker::PickToFree() const {
  SegmentPtr best;
  double best_share = 0;
  for (const auto& [number, segment] : state_.segments.by_number()) {
    if (!segment->IsComplete() || segment->damaged || segment->Needed() == 0) continue;
    const std::int64_t gain = Gain(*segment, segment->Needed());
    const double share = static_cast<double>(gain) / static_cast<double>(segment->reserved_bytes);
    if (share < 0.05 || share <= best_share) continue;
    if (!MayRelease(*segment) || !CanRelocate(*segment, segment->Needed())) continue;
    best = segment;
    best_share = share;
  }
  return best;
}

SegmentPtr VictimPicker::PickSparse(bool unpinned, const RowClass* only) const {
  SegmentPtr best;
  for (const auto& [number, segment] : state_.segments.by_number()) {
    if (segment->retired || !segment->IsComplete() || segment->damaged) continue;
    if ((unpinned && segment->pins > 0) || (only != nullptr && segment->row_class != only)) continue;
    if ((segment->slots - segment->Lasting()) * 32 < segment->slots || !CanRelocate(*segment, segment->live))
      continue;
    if (best == nullptr || LastingShare(*segment) < LastingShare(*best)) best = segment;
  }
  return best;
}

// Returns whether the segment can go without another commit once its needed rows are copied.
bool VictimPicker::MayRelease(const Segment& segment) const {
  if (segment.pins == 0) return true;
  const bool whole = segment.relocated || segment.committed_slots == segment.slots;
  return segment.pins == 1 && segment.in_last_commit && whole && committer_.CanRenew();
}

// Returns whether there is room for copies of this many of the victim's rows.
bool VictimPicker::CanRelocate(const Segment& victim, std::uint32_t rows) const {
  const RowClass& row_class = *victim.row_class;
  std::uint64_t bytes = 0, ordinals = 0;
  const auto add = [&](Stream stream) {
    const SegmentPtr& target = row_class.active[stream];
    const std::uint32_t left = target == nullptr ? 0 : target->capacity - target->slots;
    if (left >= rows) return;
    const std::uint32_t more = (rows - left - 1) / row_class.slots_per_segment + 1;
    bytes += more * row_class.MaxSegmentBytes(true);
    ordinals += more;
  };
  if (victim.CommittedSlots() > 0) add(kOfCommit);
  if (victim.CommittedSlots() < victim.slots) add(kSinceCommit);
  return bytes == 0 || (state_.space.FitsForCompaction(bytes) && ordinals <= row_class.FreeOrdinals());
}

}  // namespace tierstore
