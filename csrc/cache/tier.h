// A memory tier has lanes of slots that plan side by side (cache/tier_lane.h). A hash of a row's key says in
// which lane the row is, so no lane needs to know of another, and the threads of the pool take a lane each. A
// tier that grows never evicts, and a hash might give a lane more rows than it has slots: there the row's id
// says in which lane the row is.
//
// What a plan decides depends on the number of lanes, which the caller chooses, and never on the threads.
// cache_policies/lanes.py divides rows in the same way for the simulator.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/lane_map.h"
#include "cache/tier_lane.h"
#include "common/page_allocator.h"

namespace tierstore {

struct TierConfig {
  std::vector<LaneConfig> lanes;    // at least one lane; the tier sets their `ids`
  std::vector<LaneRange> lanes_of;  // the lanes of each table; all lanes divide the rows of further tables
};

// A plan of all lanes. Begin fills it.
class Plan {
 public:
  // Returns the plan as a lane would have it, with slots of the tier. Misses and absent rows are in the order
  // of lanes.
  const LanePlan& whole() const { return parts_.size() == 1 ? parts_[0].plan : merged_; }
  // Returns the misses that find no slot of their share. Call it after Evict.
  PageVector<std::int32_t> Unplaced() const;

 private:
  friend class Tier;
  // The rows of one lane.
  struct Part {
    LanePlan plan;
    std::size_t victims = 0;  // victims that `merged_` has already
  };

  // The rows of each lane, where there are several lanes; in a tier that no row leaves, missing rows alone.
  DividedKeys rows_;
  std::vector<Part> parts_;
  LanePlan merged_;
};

class Tier {
 public:
  static constexpr double kBytesPerSlot = TierLane::kBytesPerSlot;

  explicit Tier(const TierConfig& config);

  // These functions do what TierLane's functions do. Assign gets the keys that Begin got.
  void Begin(const std::uint64_t* keys, const std::int64_t* next_use, std::int64_t n, std::int64_t now,
             bool absent, Plan* plan);
  std::int64_t Evict(std::int64_t pinned_since, Plan* plan);
  std::int64_t Prepare(bool use_overflow, const Plan& plan);
  void Assign(const std::uint64_t* keys, bool use_overflow, Plan* plan);
  Moves Abort(Plan* plan);
  Moves Release(const std::int32_t* slots, std::int64_t n);
  Departures Drainable() const;
  void Drained(const std::int32_t* slots, std::int64_t n);
  void Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const;
  void Remove(const std::int32_t* slots, std::int64_t n);
  PageVector<std::uint64_t> Announce(const std::uint64_t* keys, std::int64_t n, std::int64_t next_use,
                                     std::int64_t now);
  void MarkDirty(const std::int32_t* slots, std::int64_t n);
  void MarkClean(const std::int32_t* slots, std::int64_t n);
  void SetDirty(const std::int32_t* slots, const std::uint8_t* dirty, std::int64_t n);
  PageVector<std::int32_t> ResidentSlots(bool only_dirty, std::int64_t from, std::int64_t limit) const;
  void KeysOf(const std::int32_t* slots, std::int64_t n, std::uint64_t* keys) const;
  // Sets dirty[i] to 1 if the row at slots[i] is dirty, or to 0.
  void DirtyOf(const std::int32_t* slots, std::int64_t n, std::uint8_t* dirty) const;
  std::int64_t capacity() const { return map_.capacity(); }
  std::vector<std::int64_t> TableRows() const;
  std::int64_t DirtyRows() const;
  std::int64_t committed() const;
  std::int64_t size() const;
  std::int64_t overflow_in_use() const;
  std::int64_t metadata_bytes() const;
  double policy_seconds() const;

  std::size_t lanes() const { return lanes_.size(); }
  // Returns the lane of a tier that has one lane; null for other tiers.
  TierLane* only_lane() { return lanes_.size() == 1 ? lanes_[0].get() : nullptr; }

 private:
  Moves MovesOf(std::vector<Moves> lanes) const;
  PageVector<std::int32_t> ResidentInTurns(bool only_dirty, std::int64_t from, std::int64_t limit) const;
  bool FindEach(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots,
                std::vector<std::int64_t>* table_rows = nullptr) const;
  DividedKeys DivideMissing(const std::uint64_t* keys, const PageVector<std::int32_t>& slots) const;
  void MergeBegin(Plan* plan) const;
  void MergeVictims(Plan* plan) const;

  std::vector<std::unique_ptr<TierLane>> lanes_;
  LaneMap map_;
  bool evicts_;  // whether a lane has a policy
};

}  // namespace tierstore
