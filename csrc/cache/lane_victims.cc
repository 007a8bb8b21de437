// Finds the rows that a plan evicts: the policies of their shares choose the rows, and get them back if the
// plan fails.
#include <string>

#include "cache/stopwatch.h"
#include "cache/tier_lane.h"

namespace tierstore {

void Departures::Reserve(std::size_t rows) {
  slots.reserve(rows);
  keys.reserve(rows);
  dirty.reserve(rows);
  next_use.reserve(rows);
}

const char* TierLane::Fault(const Share& share, std::int32_t number, std::int64_t pinned_since) const {
  if (number < 0 || number >= share.config.capacity) return "does not exist";
  const auto slot = static_cast<std::int32_t>(number + share.begin);
  if (!Resident(slot)) return "holds no row or was returned twice";
  if (last_use_[slot] >= pinned_since) return "is pinned: a batch in flight uses its row";
  return nullptr;
}

void TierLane::TakeVictim(std::int32_t slot, Departures* victims) {
  // The slot is empty, but the index finds the row until Assign: reads go on while the row is copied out.
  resident_[slot] = kEmpty;
  CountRow(row_[slot].key, -1);
  victims->slots.push_back(slot);
  victims->keys.push_back(row_[slot].key);
  victims->dirty.push_back(dirty_[slot]);
  victims->next_use.push_back(row_[slot].next_use);
}

std::int64_t TierLane::Evict(std::int64_t pinned_since, LanePlan* plan) {
  for (std::size_t s = 0; s < shares_.size(); ++s) {
    SharePlan& wanted = plan->shares[s];
    if (wanted.needed == 0 || !shares_[s].config.policy) continue;
    const std::int64_t found = EvictFrom(shares_[s], wanted.needed, pinned_since, plan);
    wanted.needed -= found;
    plan->needed -= found;
  }
  return plan->needed;
}

std::int64_t TierLane::EvictFrom(const Share& share, std::int64_t needed, std::int64_t pinned_since,
                                 LanePlan* plan) {
  Departures& victims = plan->victims;
  PageVector<std::int32_t> chosen(static_cast<std::size_t>(needed));
  const std::int64_t found = [&] {
    const Stopwatch watch(&policy_seconds_);
    return share.config.policy.evict(share.config.policy.state, needed, last_use_.data() + share.begin,
                                     pinned_since, chosen.data());
  }();
  if (found < 0 || found > needed) {
    throw PolicyFault("evict() returned " + std::to_string(found) + " where it was asked for up to " +
                      std::to_string(needed) + " slots");
  }
  chosen.resize(static_cast<std::size_t>(found));
  victims.Reserve(victims.slots.size() + chosen.size());
  const auto slot_of = [&](std::size_t i) { return static_cast<std::int32_t>(chosen[i] + share.begin); };
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (i + kAhead < chosen.size()) Prefetch(slot_of(i + kAhead));
    const char* const fault = Fault(share, chosen[i], pinned_since);
    if (fault == nullptr) {
      TakeVictim(slot_of(i), &victims);
      continue;
    }
    // The policy has dropped the other victims, too, and Abort gives them back to the policy.
    for (std::size_t j = i; j < chosen.size(); ++j) {
      if (chosen[j] >= 0 && chosen[j] < share.config.capacity && resident_[slot_of(j)] == kRow)
        TakeVictim(slot_of(j), &victims);
    }
    throw PolicyFault("evict() returned slot " + std::to_string(chosen[i]) + ", which " + fault);
  }
  return found;
}

Moves TierLane::Abort(LanePlan* plan) {
  const Departures& victims = plan->victims;
  std::vector<Uses> back(shares_.size());
  for (std::size_t i = 0; i < victims.slots.size(); ++i) {
    resident_[victims.slots[i]] = kRow;
    CountRow(victims.keys[i], 1);
    const std::size_t s = ShareOf(victims.keys[i]);
    back[s].Add(static_cast<std::int32_t>(victims.slots[i] - shares_[s].begin), victims.keys[i],
                victims.next_use[i]);
  }
  for (std::size_t s = 0; s < shares_.size(); ++s) {
    if (shares_[s].config.policy) Tell(shares_[s].config.policy.insert, shares_[s], back[s], plan->now);
  }
  std::erase_if(plan->slots, [](std::int32_t slot) { return slot < 0; });
  return Release(plan->slots.data(), static_cast<std::int64_t>(plan->slots.size()));
}

}  // namespace tierstore
