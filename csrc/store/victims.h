// Chooses the segment that compaction takes next.
//
// When space is short, compaction takes the segment that frees most bytes per row that must be copied, and
// that can go at once, if need be by renewing the last commit. Otherwise compaction takes the segment with
// the fewest lasting rows, while there are more dead bytes than are tolerated. Guarded by the store's mutex
// (store/store_mutex.h).
#pragma once

#include "store/committer.h"
#include "store/compactor_control.h"
#include "store/state.h"

namespace tierstore {

struct Victim {
  SegmentPtr segment;      // nullptr when there is nothing to win
  bool with_kept = false;  // copy rows that only the last commit needs, too

  // Returns the number of rows that are still to be copied.
  std::uint32_t Left() const { return with_kept ? segment->Needed() : segment->live; }
};

class VictimPicker {
 public:
  VictimPicker(const StoreState& state, const Committer& committer, const CompactorControl& control)
      : state_(state), committer_(committer), control_(control) {}

  Victim Pick(const Survey& survey) const;
  // Returns whether a call waits for space, or hardly any space is free.
  bool IsShort(const Survey& survey) const;
  // Returns whether the free space and the released segments are enough for a while.
  static bool IsEnough(const Survey& survey);

 private:
  SegmentPtr PickToFree() const;
  SegmentPtr PickSparse(bool unpinned, const RowClass* only = nullptr) const;
  bool MayRelease(const Segment& segment) const;
  bool CanRelocate(const Segment& victim, std::uint32_t rows) const;

  const StoreState& state_;
  const Committer& committer_;
  const CompactorControl& control_;
};

// Returns the bytes that copying this many of the segment's rows frees, less the copies with their part of
// header and footer. Negative when the copies take more.
std::int64_t Gain(const Segment& segment, std::uint32_t rows);

}  // namespace tierstore
