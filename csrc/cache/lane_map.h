// Says which lane of a memory tier has a row, and how the slots of lanes are numbered in the tier.
//
// Lanes divide rows by a hash of the key, or by the id (cache/lane_ids.h). By a hash: slots 0 .. capacity-1
// of the tier are the lanes' own slots, one lane after the other. Overflow slots come behind them; the lanes
// have these slots in turns. By the id: the lanes have all slots in turns, so that the slots that are used
// first are the tier's first slots.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/divided_keys.h"
#include "cache/lane_ids.h"
#include "common/key.h"
#include "common/page_allocator.h"

namespace tierstore {

// Lanes that divide the rows of some tables.
struct LaneRange {
  std::size_t first = 0, count = 0;
};

class LaneMap {
 public:
  struct Place {
    std::size_t lane;
    std::int32_t slot;  // of the lane
  };

  // `slots` are the own slots of each lane, `lanes_of` the lanes of each table. All lanes divide the rows of
  // tables that `lanes_of` does not have, and of all tables if they do so `by_id`.
  LaneMap(const std::vector<std::int64_t>& slots, std::vector<LaneRange> lanes_of, bool by_id);

  std::size_t lanes() const { return slots_.size(); }
  // Returns the own slots of all lanes.
  std::int64_t capacity() const { return capacity_; }
  bool by_id() const { return by_id_; }
  // Returns the first of a lane's own slots, where rows are divided by a hash.
  std::int64_t first_slot(std::size_t lane) const { return begin_[lane]; }

  std::size_t LaneOf(std::uint64_t key) const {
    if (by_id_) return LaneIds::LaneOf(key, bits_);
    const std::uint32_t table = KeyTable(key);
    const LaneRange range = table < lanes_of_.size() ? lanes_of_[table] : LaneRange{0, lanes()};
    if (range.count == 1) return range.first;
    return range.first + static_cast<std::size_t>(((MixKey(key) >> 32) * range.count) >> 32);
  }
  Place PlaceOf(std::int32_t slot) const;
  // Returns the slot of the tier; negative numbers stay.
  std::int32_t SlotOf(std::size_t lane, std::int32_t slot) const {
    if (slot < 0) return slot;
    if (by_id_) return static_cast<std::int32_t>(slot << bits_ | static_cast<std::int32_t>(lane));
    const std::int64_t own = slots_[lane];
    if (slot < own) return static_cast<std::int32_t>(begin_[lane] + slot);
    return static_cast<std::int32_t>(capacity_ + (slot - own) * static_cast<std::int64_t>(lanes()) +
                                     static_cast<std::int64_t>(lane));
  }
  void ToTier(std::size_t lane, PageVector<std::int32_t>* slots) const;
  // Divides keys by the lane of their rows.
  DividedKeys Divide(const std::uint64_t* keys, std::int64_t n) const;
  // Returns the slots of every lane, as the lane numbers them.
  std::vector<PageVector<std::int32_t>> DivideSlots(const std::int32_t* slots, std::int64_t n) const;

 private:
  std::vector<std::int64_t> slots_;
  std::vector<std::int64_t> begin_;  // the first slot of each lane
  std::int64_t capacity_ = 0;
  std::vector<LaneRange> lanes_of_;
  bool by_id_;
  int bits_ = 0;  // where rows are divided by their ids: of the number of a lane
};

}  // namespace tierstore
