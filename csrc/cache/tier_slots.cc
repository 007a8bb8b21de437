// Implements what a tier keeps of its slots: which rows are there, and which of them are dirty.
#include <algorithm>

#include "cache/tier.h"
#include "common/thread_pool.h"

namespace tierstore {
namespace {
// Slots are in no order, and each costs a cache miss or two.
constexpr std::int64_t kSlotsOfThread = 1 << 13;

// Calls work(i) for positions 0 .. n-1, in threads of the pool where there are many.
template <typename Work>
void ForSlots(std::int64_t n, const Work& work) {
  ParallelFor(0, n, kSlotsOfThread, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) work(i);
  });
}

}  // namespace

void Tier::MarkDirty(const std::int32_t* slots, std::int64_t n) {
  if (lanes_.size() == 1) {
    lanes_[0]->MarkDirty(slots, n);
    return;
  }
  ForSlots(n, [&](std::int64_t i) {
    const LaneMap::Place place = map_.PlaceOf(slots[i]);
    lanes_[place.lane]->MarkDirty(&place.slot, 1);
  });
}

void Tier::MarkClean(const std::int32_t* slots, std::int64_t n) {
  ForSlots(n, [&](std::int64_t i) {
    const LaneMap::Place place = map_.PlaceOf(slots[i]);
    lanes_[place.lane]->MarkClean(&place.slot, 1);
  });
}

void Tier::SetDirty(const std::int32_t* slots, const std::uint8_t* dirty, std::int64_t n) {
  ForSlots(n, [&](std::int64_t i) {
    const LaneMap::Place place = map_.PlaceOf(slots[i]);
    lanes_[place.lane]->SetDirty(&place.slot, &dirty[i], 1);
  });
}

void Tier::KeysOf(const std::int32_t* slots, std::int64_t n, std::uint64_t* keys) const {
  ForSlots(n, [&](std::int64_t i) {
    const LaneMap::Place place = map_.PlaceOf(slots[i]);
    keys[i] = lanes_[place.lane]->key(place.slot);
  });
}

void Tier::DirtyOf(const std::int32_t* slots, std::int64_t n, std::uint8_t* dirty) const {
  ForSlots(n, [&](std::int64_t i) {
    const LaneMap::Place place = map_.PlaceOf(slots[i]);
    dirty[i] = lanes_[place.lane]->dirty()[place.slot] != 0;
  });
}

std::int64_t Tier::DirtyRows() const {
  std::int64_t rows = 0;
  for (const auto& lane : lanes_) rows += lane->DirtyRows();
  return rows;
}

PageVector<std::int32_t> Tier::ResidentSlots(bool only_dirty, std::int64_t from, std::int64_t limit) const {
  if (lanes_.size() == 1) return lanes_[0]->ResidentSlots(only_dirty, from, limit);
  if (map_.by_id()) return ResidentInTurns(only_dirty, from, limit);
  PageVector<std::int32_t> slots;
  const auto room = [&] { return limit - static_cast<std::int64_t>(slots.size()); };
  for (std::size_t lane = 0; lane < lanes_.size() && room() > 0; ++lane) {
    const std::int64_t own = lanes_[lane]->capacity();
    if (from >= map_.first_slot(lane) + own) continue;
    const std::int64_t begin = std::max<std::int64_t>(0, from - map_.first_slot(lane));
    for (const std::int32_t slot : lanes_[lane]->ResidentSlots(only_dirty, begin, room())) {
      if (slot < own) slots.push_back(map_.SlotOf(lane, slot));
    }
  }
  if (room() <= 0) return slots;
  PageVector<std::int32_t> overflow;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    const TierLane& own = *lanes_[lane];
    for (const std::int32_t slot : own.ResidentSlots(only_dirty, own.capacity(), own.overflow_in_use()))
      overflow.push_back(map_.SlotOf(lane, slot));
  }
  std::sort(overflow.begin(), overflow.end());
  for (const std::int32_t slot : overflow) {
    if (slot >= from && room() > 0) slots.push_back(slot);
  }
  return slots;
}

// Of lanes that have the slots in turns.
PageVector<std::int32_t> Tier::ResidentInTurns(bool only_dirty, std::int64_t from, std::int64_t limit) const {
  PageVector<std::int32_t> slots;
  const std::int64_t end = committed();
  for (std::int64_t i = from; i < end && static_cast<std::int64_t>(slots.size()) < limit; ++i) {
    const auto slot = static_cast<std::int32_t>(i);
    const LaneMap::Place place = map_.PlaceOf(slot);
    if (lanes_[place.lane]->HasRow(place.slot, only_dirty)) slots.push_back(slot);
  }
  return slots;
}

}  // namespace tierstore
