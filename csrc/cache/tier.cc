#include "cache/tier.h"

#include <algorithm>
#include <exception>
#include <stdexcept>

#include "common/thread_pool.h"

namespace tierstore {
namespace {
// Calls work(lane) for every lane, in threads of the pool.
template <typename Work>
void ForLanes(std::size_t lanes, const Work& work) {
  ParallelFor(0, static_cast<std::int64_t>(lanes), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t lane = begin; lane < end; ++lane) work(static_cast<std::size_t>(lane));
  });
}

template <typename T>
void Append(const PageVector<T>& from, std::size_t begin, PageVector<T>* to) {
  to->insert(to->end(), from.begin() + static_cast<std::ptrdiff_t>(begin), from.end());
}

template <typename T>
PageVector<T> Gather(const T* values, const PageVector<std::int32_t>& positions) {
  PageVector<T> out(positions.size());
  for (std::size_t i = 0; i < positions.size(); ++i) out[i] = values[positions[i]];
  return out;
}

std::vector<std::int64_t> OwnSlots(const std::vector<std::unique_ptr<TierLane>>& lanes) {
  std::vector<std::int64_t> slots;
  for (const auto& lane : lanes) slots.push_back(lane->capacity());
  return slots;
}

std::vector<std::unique_ptr<TierLane>> Lanes(const std::vector<LaneConfig>& configs) {
  std::vector<std::unique_ptr<TierLane>> lanes;
  for (const LaneConfig& lane : configs) {
    if (lane.grows && configs.size() > 1) throw std::invalid_argument("a tier that grows has one lane only");
    lanes.push_back(std::make_unique<TierLane>(lane));
  }
  return lanes;
}

}  // namespace

Tier::Tier(const TierConfig& config) : lanes_(Lanes(config.lanes)), map_(OwnSlots(lanes_), config.lanes_of) {}

void Tier::Begin(const std::uint64_t* keys, const std::int64_t* next_use, std::int64_t n, std::int64_t now,
                 bool absent, Plan* plan) {
  plan->parts_.resize(lanes_.size());
  if (lanes_.size() == 1) {
    lanes_[0]->Begin(keys, next_use, n, now, absent, &plan->parts_[0].plan);
    return;
  }
  std::vector<PageVector<std::int32_t>> positions = map_.Divide(keys, n);
  ForLanes(lanes_.size(), [&](std::size_t lane) {
    Plan::Part& part = plan->parts_[lane];
    part.positions = std::move(positions[lane]);
    part.keys = Gather(keys, part.positions);
    PageVector<std::int64_t> uses;
    if (next_use != nullptr) uses = Gather(next_use, part.positions);
    lanes_[lane]->Begin(part.keys.data(), next_use != nullptr ? uses.data() : nullptr,
                        static_cast<std::int64_t>(part.keys.size()), now, absent, &part.plan);
  });
  plan->merged_.now = now;
  MergeBegin(n, plan);
}

void Tier::MergeBegin(std::int64_t n, Plan* plan) const {
  LanePlan& merged = plan->merged_;
  merged.slots.assign(static_cast<std::size_t>(n), -1);
  const std::size_t tables = plan->parts_[0].plan.table_rows.size();
  merged.table_rows.assign(tables, 0);
  merged.table_hits.assign(tables, 0);
  for (const Plan::Part& part : plan->parts_) {
    for (const std::int32_t miss : part.plan.misses) merged.misses.push_back(part.positions[miss]);
    for (const std::int32_t miss : part.plan.absent) merged.absent.push_back(part.positions[miss]);
    merged.needed += part.plan.needed;
    merged.refused += part.plan.refused;
    for (std::size_t table = 0; table < tables; ++table) {
      merged.table_rows[table] += part.plan.table_rows[table];
      merged.table_hits[table] += part.plan.table_hits[table];
    }
  }
}

PageVector<std::int32_t> Plan::Unplaced() const {
  if (parts_.size() == 1) return parts_[0].plan.Unplaced();
  PageVector<std::int32_t> unplaced;
  for (const Part& part : parts_) {
    for (const std::int32_t row : part.plan.Unplaced()) unplaced.push_back(part.positions[row]);
  }
  return unplaced;
}

// A lane that fails does not keep the other lanes from finding their victims, which Abort gives back.
std::int64_t Tier::Evict(std::int64_t pinned_since, Plan* plan) {
  if (lanes_.size() == 1) return lanes_[0]->Evict(pinned_since, &plan->parts_[0].plan);
  std::vector<std::exception_ptr> errors(lanes_.size());
  ForLanes(lanes_.size(), [&](std::size_t lane) {
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

void Tier::MergeVictims(Plan* plan) const {
  LanePlan& merged = plan->merged_;
  merged.needed = 0;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    Plan::Part& part = plan->parts_[lane];
    const Departures& victims = part.plan.victims;
    for (std::size_t i = part.victims; i < victims.slots.size(); ++i)
      merged.victims.slots.push_back(map_.SlotOf(lane, victims.slots[i]));
    Append(victims.keys, part.victims, &merged.victims.keys);
    Append(victims.dirty, part.victims, &merged.victims.dirty);
    Append(victims.next_use, part.victims, &merged.victims.next_use);
    part.victims = victims.slots.size();
    merged.needed += part.plan.needed;
  }
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
  ForLanes(lanes_.size(), [&](std::size_t lane) {
    Plan::Part& part = plan->parts_[lane];
    lanes_[lane]->Assign(part.keys.data(), use_overflow, &part.plan);
    for (std::size_t i = 0; i < part.positions.size(); ++i)
      slots[part.positions[i]] = map_.SlotOf(lane, part.plan.slots[i]);
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
    Append(lanes[lane].from, 0, &moves.from);
    Append(lanes[lane].to, 0, &moves.to);
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
    Append(rows.slots, 0, &all.slots);
    Append(rows.keys, 0, &all.keys);
    Append(rows.dirty, 0, &all.dirty);
    Append(rows.next_use, 0, &all.next_use);
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
  const std::vector<PageVector<std::int32_t>> positions = map_.Divide(keys, n);
  ForLanes(lanes_.size(), [&](std::size_t lane) {
    const PageVector<std::int32_t>& at = positions[lane];
    const PageVector<std::uint64_t> own = Gather(keys, at);
    PageVector<std::int32_t> found(own.size());
    lanes_[lane]->Find(own.data(), static_cast<std::int64_t>(own.size()), found.data());
    for (std::size_t i = 0; i < at.size(); ++i) slots[at[i]] = map_.SlotOf(lane, found[i]);
  });
}

void Tier::Remove(const std::int32_t* slots, std::int64_t n) {
  const std::vector<PageVector<std::int32_t>> parts = map_.DivideSlots(slots, n);
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    const PageVector<std::int32_t>& own = parts[lane];
    lanes_[lane]->Remove(own.data(), static_cast<std::int64_t>(own.size()));
  }
}

PageVector<std::uint64_t> Tier::Announce(const std::uint64_t* keys, std::int64_t n, std::int64_t next_use,
                                         std::int64_t now) {
  if (lanes_.size() == 1) return lanes_[0]->Announce(keys, n, next_use, now);
  const std::vector<PageVector<std::int32_t>> positions = map_.Divide(keys, n);
  std::vector<PageVector<std::uint64_t>> absent(lanes_.size());
  ForLanes(lanes_.size(), [&](std::size_t lane) {
    const PageVector<std::uint64_t> own = Gather(keys, positions[lane]);
    absent[lane] = lanes_[lane]->Announce(own.data(), static_cast<std::int64_t>(own.size()), next_use, now);
  });
  for (std::size_t lane = 1; lane < lanes_.size(); ++lane) Append(absent[lane], 0, &absent[0]);
  return std::move(absent[0]);
}

void Tier::MarkDirty(const std::int32_t* slots, std::int64_t n) {
  if (lanes_.size() == 1) {
    lanes_[0]->MarkDirty(slots, n);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const LaneMap::Place place = map_.PlaceOf(slots[i]);
    lanes_[place.lane]->MarkDirty(&place.slot, 1);
  }
}

void Tier::MarkClean(const std::int32_t* slots, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const LaneMap::Place place = map_.PlaceOf(slots[i]);
    lanes_[place.lane]->MarkClean(&place.slot, 1);
  }
}

void Tier::SetDirty(const std::int32_t* slots, const std::uint8_t* dirty, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const LaneMap::Place place = map_.PlaceOf(slots[i]);
    lanes_[place.lane]->SetDirty(&place.slot, &dirty[i], 1);
  }
}

PageVector<std::int32_t> Tier::ResidentSlots(bool only_dirty, std::int64_t from, std::int64_t limit) const {
  if (lanes_.size() == 1) return lanes_[0]->ResidentSlots(only_dirty, from, limit);
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

std::uint64_t Tier::key(std::int32_t slot) const {
  const LaneMap::Place place = map_.PlaceOf(slot);
  return lanes_[place.lane]->key(place.slot);
}

bool Tier::dirty(std::int32_t slot) const {
  const LaneMap::Place place = map_.PlaceOf(slot);
  return lanes_[place.lane]->dirty()[place.slot] != 0;
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
