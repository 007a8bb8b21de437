// The transient pad of a memory tier: rows that were not admitted or do not fit, until nobody uses them.
#include <stdexcept>

#include "cache/tier.h"

namespace tierstore {

std::int32_t Tier::TakePadSlot() {
  if (!pad_free_.empty()) {
    const std::int32_t slot = pad_free_.back();
    pad_free_.pop_back();
    return slot;
  }
  const std::int64_t pad = static_cast<std::int64_t>(pad_users_.size());
  if (pad >= config_.pad) throw std::logic_error("the pad has no slot that was prepared");
  pad_users_.push_back(-1);
  pad_home_.push_back(-1);
  CommitSlots(capacity_ + pad + 1);
  return static_cast<std::int32_t>(capacity_ + pad);
}

void Tier::ForgetPadSlot(std::int32_t slot) {
  index_.Erase(slot);
  resident_[slot] = kEmpty;
  pad_users_[slot - capacity_] = -1;
  pad_home_[slot - capacity_] = -1;
  pad_free_.push_back(slot);
}

// The slot that the row at a pad slot was given, where it is found from now on.
std::int32_t Tier::MoveHome(std::int32_t slot) {
  const std::int32_t home = pad_home_[slot - capacity_];
  dirty_[home] = dirty_[slot];
  ForgetPadSlot(slot);
  resident_[home] = kRow;
  index_.Insert(home);
  return home;
}

Moves Tier::Release(const std::int32_t* slots, std::int64_t n) {
  Moves moves;
  if (pad_users_.empty()) return moves;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t pad = slots[i] - capacity_;
    if (pad < 0 || --pad_users_[pad] > 0) continue;
    if (pad_home_[pad] < 0) {
      pad_drainable_.push_back(slots[i]);
      continue;
    }
    moves.from.push_back(slots[i]);
    moves.to.push_back(MoveHome(slots[i]));
  }
  return moves;
}

Departures Tier::Drainable() const {
  Departures out;
  for (const std::int32_t slot : pad_drainable_) {
    if (pad_users_[slot - capacity_] != 0) continue;  // used again since
    out.slots.push_back(slot);
    out.keys.push_back(row_[slot].key);
    out.dirty.push_back(dirty_[slot]);
    out.next_use.push_back(row_[slot].next_use);
  }
  return out;
}

void Tier::Drained(const std::int32_t* slots, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) ForgetPadSlot(slots[i]);
  pad_drainable_.clear();
  if (pad_in_use() > 0) return;
  pad_users_.clear();
  pad_home_.clear();
  pad_free_.clear();
}

std::int64_t Tier::pad_in_use() const {
  return static_cast<std::int64_t>(pad_users_.size() - pad_free_.size());
}

}  // namespace tierstore
