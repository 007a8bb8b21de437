#include "cache/tier.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <span>
#include <stdexcept>
#include <utility>

#include "common/thread_pool.h"

namespace tierstore {
namespace {
constexpr std::int64_t kParallelRows = 1 << 12;
constexpr std::int64_t kBlock = 128;  // keys whose lanes are found at a time

// Calls work(lane) for every lane, in threads of the pool where the lanes have many rows together.
template <typename Work>
void ForLanes(std::size_t lanes, std::int64_t rows, const Work& work) {
  const auto count = static_cast<std::int64_t>(lanes);
  ParallelFor(0, count, rows < kParallelRows ? count : 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t lane = begin; lane < end; ++lane) work(static_cast<std::size_t>(lane));
  });
}

template <typename T>
void Append(const PageVector<T>& from, PageVector<T>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

template <typename T>
void Gather(const T* values, std::span<const std::int32_t> positions, PageVector<T>* out) {
  out->reserve(positions.size());
  for (const std::int32_t position : positions) out->push_back(values[position]);
}

// Returns where the rows of each lane begin in an array of all lanes, behind `first` other elements, and the
// new size of the array.
template <typename Count>
std::vector<std::size_t> Begins(std::size_t lanes, std::size_t first, const Count& count) {
  std::vector<std::size_t> begin = {first};
  for (std::size_t lane = 0; lane < lanes; ++lane) begin.push_back(begin.back() + count(lane));
  return begin;
}

std::vector<std::int64_t> OwnSlots(const std::vector<std::unique_ptr<TierLane>>& lanes) {
  std::vector<std::int64_t> slots;
  for (const auto& lane : lanes) slots.push_back(lane->capacity());
  return slots;
}

bool Grows(const std::vector<LaneConfig>& lanes) {
  const auto grows = [](const LaneConfig& lane) { return lane.grows; };
  if (!std::any_of(lanes.begin(), lanes.end(), grows)) return false;
  if (!std::all_of(lanes.begin(), lanes.end(), grows) || lanes.size() > LaneIds::kMostLanes)
    throw std::invalid_argument("all lanes of a tier grow, and these are 16 at most, or no lane grows");
  return true;
}

std::vector<std::unique_ptr<TierLane>> Lanes(const std::vector<LaneConfig>& configs) {
  std::vector<std::unique_ptr<TierLane>> lanes;
  const bool by_id = Grows(configs);
  for (LaneConfig lane : configs) {
    if (by_id) lane.ids = LaneIds::Of(lanes.size(), configs.size());
    lanes.push_back(std::make_unique<TierLane>(lane));
  }
  return lanes;
}

}  // namespace

Tier::Tier(const TierConfig& config)
    : lanes_(Lanes(config.lanes)),
      map_(OwnSlots(lanes_), config.lanes_of, Grows(config.lanes)),
      evicts_(std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->evicts(); })) {}

void Tier::Begin(const std::uint64_t* keys, const std::int64_t* next_use, std::int64_t n, std::int64_t now,
                 bool absent, Plan* plan) {
  plan->parts_.resize(lanes_.size());
  if (lanes_.size() == 1) {
    LanePlan& only = plan->parts_[0].plan;
    if (next_use != nullptr) only.next_use.assign(next_use, next_use + n);
    lanes_[0]->Begin(keys, n, now, absent, &only);
    return;
  }
  LanePlan& merged = plan->merged_;
  merged.now = now;
  merged.slots.resize(static_cast<std::size_t>(n));
  std::vector<std::int64_t> here(lanes_[0]->tables());
  if (!evicts_ && !absent && FindEach(keys, n, merged.slots.data(), &here)) {
    plan->rows_ = DivideMissing(keys, merged.slots);
    absent = true;
  } else {
    std::fill(merged.slots.begin(), merged.slots.end(), -1);
    std::fill(here.begin(), here.end(), 0);
    plan->rows_ = map_.Divide(keys, n);
  }
  merged.table_rows = merged.table_hits = std::move(here);
  ForLanes(lanes_.size(), plan->rows_.total(), [&](std::size_t lane) {
    LanePlan& part = plan->parts_[lane].plan;
    if (next_use != nullptr) Gather(next_use, plan->rows_.positions(lane), &part.next_use);
    const std::span<const std::uint64_t> own = plan->rows_.keys(lane);
    lanes_[lane]->Begin(own.data(), static_cast<std::int64_t>(own.size()), now, absent, &part);
  });
  MergeBegin(plan);
}

// Divides the keys without a slot among the lanes. Their positions are those among all keys.
DividedKeys Tier::DivideMissing(const std::uint64_t* keys, const PageVector<std::int32_t>& slots) const {
  PageVector<std::int32_t> positions;
  PageVector<std::uint64_t> missing;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] >= 0) continue;
    positions.push_back(static_cast<std::int32_t>(i));
    missing.push_back(keys[i]);
  }
  DividedKeys divided = map_.Divide(missing.data(), static_cast<std::int64_t>(missing.size()));
  divided.MapPositions(positions.data());
  return divided;
}

void Tier::MergeBegin(Plan* plan) const {
  LanePlan& merged = plan->merged_;
  for (const Plan::Part& part : plan->parts_) {
    merged.needed += part.plan.needed;
    merged.refused += part.plan.refused;
    for (std::size_t table = 0; table < merged.table_rows.size(); ++table) {
      merged.table_rows[table] += part.plan.table_rows[table];
      merged.table_hits[table] += part.plan.table_hits[table];
    }
  }
  const auto begins = [&](PageVector<std::int32_t> LanePlan::* rows) {
    const std::vector<std::size_t> begin =
        Begins(lanes_.size(), 0, [&](std::size_t lane) { return (plan->parts_[lane].plan.*rows).size(); });
    (merged.*rows).resize(begin.back());
    return begin;
  };
  const std::vector<std::size_t> misses = begins(&LanePlan::misses), absent = begins(&LanePlan::absent);
  ForLanes(lanes_.size(), static_cast<std::int64_t>(misses.back()), [&](std::size_t lane) {
    const std::span<const std::int32_t> positions = plan->rows_.positions(lane);
    const LanePlan& own = plan->parts_[lane].plan;
    std::int32_t* to = merged.misses.data() + misses[lane];
    for (const std::int32_t row : own.misses) *to++ = positions[row];
    to = merged.absent.data() + absent[lane];
    for (const std::int32_t row : own.absent) *to++ = positions[row];
  });
}

PageVector<std::int32_t> Plan::Unplaced() const {
  if (parts_.size() == 1) return parts_[0].plan.Unplaced();
  PageVector<std::int32_t> unplaced;
  for (std::size_t lane = 0; lane < parts_.size(); ++lane) {
    for (const std::int32_t row : parts_[lane].plan.Unplaced())
      unplaced.push_back(rows_.positions(lane)[static_cast<std::size_t>(row)]);
  }
  return unplaced;
}

// A lane that fails does not keep the other lanes from finding their victims, which Abort gives back.
std::int64_t Tier::Evict(std::int64_t pinned_since, Plan* plan) {
  if (lanes_.size() == 1) return lanes_[0]->Evict(pinned_since, &plan->parts_[0].plan);
  std::vector<std::exception_ptr> errors(lanes_.size());
  ForLanes(lanes_.size(), plan->merged_.needed, [&](std::size_t lane) {
    try {
      lanes_[lane]->Evict(pinned_since, &plan->parts_[lane].plan);
    } catch (...) {
      errors[lane] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  MergeVictims(plan);
  return plan->merged_.needed;
}

// Adds the victims that the lanes have found since the last call.
void Tier::MergeVictims(Plan* plan) const {
  Departures& merged = plan->merged_.victims;
  const std::vector<std::size_t> begin = Begins(lanes_.size(), merged.slots.size(), [&](std::size_t lane) {
    return plan->parts_[lane].plan.victims.slots.size() - plan->parts_[lane].victims;
  });
  merged.slots.resize(begin.back());
  merged.keys.resize(begin.back());
  merged.dirty.resize(begin.back());
  merged.next_use.resize(begin.back());
  ForLanes(lanes_.size(), static_cast<std::int64_t>(begin.back() - begin[0]), [&](std::size_t lane) {
    Plan::Part& part = plan->parts_[lane];
    const Departures& victims = part.plan.victims;
    std::size_t at = begin[lane];
    for (; part.victims < victims.slots.size(); ++part.victims, ++at) {
      merged.slots[at] = map_.SlotOf(lane, victims.slots[part.victims]);
      merged.keys[at] = victims.keys[part.victims];
      merged.dirty[at] = victims.dirty[part.victims];
      merged.next_use[at] = victims.next_use[part.victims];
    }
  });
  plan->merged_.needed = 0;
  for (const Plan::Part& part : plan->parts_) plan->merged_.needed += part.plan.needed;
}

std::int64_t Tier::Prepare(bool use_overflow, const Plan& plan) {
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane)
    lanes_[lane]->Prepare(use_overflow, plan.parts_[lane].plan);
  return committed();
}

void Tier::Assign(const std::uint64_t* keys, bool use_overflow, Plan* plan) {
  if (lanes_.size() == 1) {
    lanes_[0]->Assign(keys, use_overflow, &plan->parts_[0].plan);
    return;
  }
  PageVector<std::int32_t>& slots = plan->merged_.slots;
  ForLanes(lanes_.size(), plan->rows_.total(), [&](std::size_t lane) {
    LanePlan& part = plan->parts_[lane].plan;
    lanes_[lane]->Assign(plan->rows_.keys(lane).data(), use_overflow, &part);
    const std::span<const std::int32_t> positions = plan->rows_.positions(lane);
    for (std::size_t i = 0; i < positions.size(); ++i) slots[positions[i]] = map_.SlotOf(lane, part.slots[i]);
  });
}

Moves Tier::MovesOf(std::vector<Moves> lanes) const {
  Moves moves = std::move(lanes[0]);
  if (lanes.size() == 1) return moves;
  map_.ToTier(0, &moves.from);
  map_.ToTier(0, &moves.to);
  for (std::size_t lane = 1; lane < lanes.size(); ++lane) {
    map_.ToTier(lane, &lanes[lane].from);
    map_.ToTier(lane, &lanes[lane].to);
    Append(lanes[lane].from, &moves.from);
    Append(lanes[lane].to, &moves.to);
  }
  return moves;
}

Moves Tier::Abort(Plan* plan) {
  std::vector<Moves> moves;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane)
    moves.push_back(lanes_[lane]->Abort(&plan->parts_[lane].plan));
  return MovesOf(std::move(moves));
}

Moves Tier::Release(const std::int32_t* slots, std::int64_t n) {
  if (lanes_.size() == 1) return lanes_[0]->Release(slots, n);
  if (overflow_in_use() == 0) return {};
  const std::vector<PageVector<std::int32_t>> parts = map_.DivideSlots(slots, n);
  std::vector<Moves> moves;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    const PageVector<std::int32_t>& own = parts[lane];
    moves.push_back(lanes_[lane]->Release(own.data(), static_cast<std::int64_t>(own.size())));
  }
  return MovesOf(std::move(moves));
}

Departures Tier::Drainable() const {
  if (lanes_.size() == 1) return lanes_[0]->Drainable();
  Departures all;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    Departures rows = lanes_[lane]->Drainable();
    map_.ToTier(lane, &rows.slots);
    Append(rows.slots, &all.slots);
    Append(rows.keys, &all.keys);
    Append(rows.dirty, &all.dirty);
    Append(rows.next_use, &all.next_use);
  }
  return all;
}

void Tier::Drained(const std::int32_t* slots, std::int64_t n) {
  const std::vector<PageVector<std::int32_t>> parts = map_.DivideSlots(slots, n);
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    const PageVector<std::int32_t>& own = parts[lane];
    lanes_[lane]->Drained(own.data(), static_cast<std::int64_t>(own.size()));
  }
}

void Tier::Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const {
  if (lanes_.size() == 1) {
    lanes_[0]->Find(keys, n, slots);
    return;
  }
  if (!evicts_) {
    FindEach(keys, n, slots);
    return;
  }
  // The index of such a lane is small, and stays in the cache of the thread that has the lane.
  const DividedKeys rows = map_.Divide(keys, n);
  ForLanes(lanes_.size(), n, [&](std::size_t lane) {
    const std::span<const std::int32_t> positions = rows.positions(lane);
    PageVector<std::int32_t> found(positions.size());
    lanes_[lane]->Find(rows.keys(lane).data(), rows.size(lane), found.data());
    for (std::size_t i = 0; i < positions.size(); ++i) slots[positions[i]] = map_.SlotOf(lane, found[i]);
  });
}

// Finds the slots of keys in their order: to divide them among the lanes would take longer, as a rule, since
// rows that never leave are in arrays by id, and in many of them. Adds rows that are here to the counts of
// their tables. Returns whether none of them is at an overflow slot.
bool Tier::FindEach(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots,
                    std::vector<std::int64_t>* table_rows) const {
  std::atomic<bool> stay{true};
  std::mutex counting;
  ParallelFor(0, n, kParallelRows, [&](std::int64_t first, std::int64_t last) {
    std::size_t lanes[kBlock];
    const SlotIndex* indices[kBlock];
    std::vector<std::int64_t> here(table_rows == nullptr ? 0 : table_rows->size());
    std::int32_t largest = -1;
    for (std::int64_t begin = first; begin < last; begin += kBlock) {
      const std::int64_t count = std::min(kBlock, last - begin);
      for (std::int64_t i = 0; i < count; ++i) {
        lanes[i] = map_.LaneOf(keys[begin + i]);
        indices[i] = &lanes_[lanes[i]]->index();
      }
      SlotIndex::FindEach(indices, keys + begin, count, slots + begin);
      for (std::int64_t i = 0; i < count; ++i) {
        std::int32_t& slot = slots[begin + i];
        slot = map_.SlotOf(lanes[i], slot);
        largest = std::max(largest, slot);
        const std::size_t table = KeyTable(keys[begin + i]);
        if (table < here.size()) here[table] += slot >= 0;
      }
    }
    if (largest >= map_.capacity()) stay = false;
    if (table_rows == nullptr) return;
    const std::lock_guard lock(counting);
    for (std::size_t table = 0; table < here.size(); ++table) (*table_rows)[table] += here[table];
  });
  return stay;
}

void Tier::Remove(const std::int32_t* slots, std::int64_t n) {
  const std::vector<PageVector<std::int32_t>> parts = map_.DivideSlots(slots, n);
  ForLanes(lanes_.size(), n, [&](std::size_t lane) {
    const PageVector<std::int32_t>& own = parts[lane];
    lanes_[lane]->Remove(own.data(), static_cast<std::int64_t>(own.size()));
  });
}

PageVector<std::uint64_t> Tier::Announce(const std::uint64_t* keys, std::int64_t n, std::int64_t next_use,
                                         std::int64_t now) {
  if (lanes_.size() == 1) return lanes_[0]->Announce(keys, n, next_use, now);
  PageVector<std::int32_t> slots(evicts_ ? 0 : static_cast<std::size_t>(n));
  // Of rows that never leave nobody asks when they are used.
  const bool missing = !evicts_ && FindEach(keys, n, slots.data());
  const DividedKeys rows = missing ? DivideMissing(keys, slots) : map_.Divide(keys, n);
  std::vector<PageVector<std::uint64_t>> absent(lanes_.size());
  ForLanes(lanes_.size(), rows.total(), [&](std::size_t lane) {
    absent[lane] = lanes_[lane]->Announce(rows.keys(lane).data(), rows.size(lane), next_use, now);
  });
  for (std::size_t lane = 1; lane < lanes_.size(); ++lane) Append(absent[lane], &absent[0]);
  return std::move(absent[0]);
}

std::vector<std::int64_t> Tier::TableRows() const {
  std::vector<std::int64_t> rows = lanes_[0]->TableRows();
  for (std::size_t lane = 1; lane < lanes_.size(); ++lane) {
    const std::vector<std::int64_t> more = lanes_[lane]->TableRows();
    for (std::size_t table = 0; table < rows.size(); ++table) rows[table] += more[table];
  }
  return rows;
}

std::int64_t Tier::committed() const {
  if (lanes_.size() == 1) return lanes_[0]->committed();
  if (map_.by_id()) {
    std::int64_t most = 0;
    for (const auto& lane : lanes_) most = std::max(most, lane->committed());
    return most * static_cast<std::int64_t>(lanes_.size());
  }
  std::int64_t overflow = 0;
  for (const auto& lane : lanes_) overflow = std::max(overflow, lane->committed() - lane->capacity());
  return map_.capacity() + overflow * static_cast<std::int64_t>(lanes_.size());
}

std::int64_t Tier::size() const {
  std::int64_t rows = 0;
  for (const auto& lane : lanes_) rows += lane->size();
  return rows;
}

std::int64_t Tier::overflow_in_use() const {
  std::int64_t rows = 0;
  for (const auto& lane : lanes_) rows += lane->overflow_in_use();
  return rows;
}

std::int64_t Tier::metadata_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& lane : lanes_) bytes += lane->metadata_bytes();
  return bytes;
}

double Tier::policy_seconds() const {
  double seconds = 0;
  for (const auto& lane : lanes_) seconds += lane->policy_seconds();
  return seconds;
}

}  // namespace tierstore
