// Implements the overflow slots of a memory tier. They hold rows that were not admitted or do not fit, for as
// long as a lookup uses the rows.
#include <stdexcept>

#include "cache/tier_lane.h"

namespace tierstore {

std::int32_t TierLane::TakeOverflowSlot() {
  if (!overflow_free_.empty()) {
    const std::int32_t slot = overflow_free_.back();
    overflow_free_.pop_back();
    return slot;
  }
  const std::int64_t overflow = static_cast<std::int64_t>(overflow_users_.size());
  if (overflow >= config_.overflow_slots) throw std::logic_error("no overflow slot was prepared");
  overflow_users_.push_back(-1);
  overflow_home_.push_back(-1);
  CommitSlots(capacity_ + overflow + 1);
  return static_cast<std::int32_t>(capacity_ + overflow);
}

void TierLane::ForgetOverflowSlot(std::int32_t slot) {
  index_.Erase(slot);
  resident_[slot] = kEmpty;
  overflow_users_[slot - capacity_] = -1;
  overflow_home_[slot - capacity_] = -1;
  overflow_free_.push_back(slot);
}

// Moves the row at an overflow slot to the share's slot that it was given, and returns that slot.
std::int32_t TierLane::MoveHome(std::int32_t slot) {
  const std::int32_t home = overflow_home_[slot - capacity_];
  dirty_[home] = dirty_[slot];
  ForgetOverflowSlot(slot);
  resident_[home] = kRow;
  index_.Insert(home);
  return home;
}

Moves TierLane::Release(const std::int32_t* slots, std::int64_t n) {
  Moves moves;
  if (overflow_users_.empty()) return moves;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t overflow = slots[i] - capacity_;
    if (overflow < 0 || --overflow_users_[overflow] > 0) continue;
    if (overflow_home_[overflow] < 0) {
      overflow_drainable_.push_back(slots[i]);
      continue;
    }
    moves.from.push_back(slots[i]);
    moves.to.push_back(MoveHome(slots[i]));
  }
  return moves;
}

Departures TierLane::Drainable() const {
  Departures out;
  for (const std::int32_t slot : overflow_drainable_) {
    if (overflow_users_[slot - capacity_] != 0) continue;  // used again since
    out.slots.push_back(slot);
    out.keys.push_back(row_[slot].key);
    out.dirty.push_back(dirty_[slot]);
    out.next_use.push_back(row_[slot].next_use);
  }
  return out;
}

void TierLane::Drained(const std::int32_t* slots, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) ForgetOverflowSlot(slots[i]);
  overflow_drainable_.clear();
  if (overflow_in_use() > 0) return;
  overflow_users_.clear();
  overflow_home_.clear();
  overflow_free_.clear();
}

std::int64_t TierLane::overflow_in_use() const {
  return static_cast<std::int64_t>(overflow_users_.size() - overflow_free_.size());
}

}  // namespace tierstore
