#include "cache/tier_lane.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cache/stopwatch.h"
#include "common/thread_pool.h"

namespace tierstore {
namespace {
// Memory is made accessible in steps of this many slots of all lanes that grow; pages cost nothing before
// they are written.
constexpr std::int64_t kGrowthStep = 4096;
// Slots are in no order, so the data of this many slots is prefetched.
constexpr std::int64_t kBlock = 128;
// A thread reads the flags of this many slots at a time, one after the other.
constexpr std::int64_t kFlagsOfThread = 1 << 19;

}  // namespace

std::vector<TierLane::Share> TierLane::SharesOf(const LaneConfig& config) {
  if (config.shares.empty() || (config.grows && config.shares.size() > 1))
    throw std::invalid_argument("a tier needs a share, and a tier that grows has one share only");
  std::vector<Share> shares;
  std::int64_t begin = 0;
  for (const ShareConfig& share : config.shares) {
    shares.push_back({share, begin});
    begin += share.capacity;
  }
  for (const std::int32_t share : config.share_of) {
    if (share < 0 || static_cast<std::size_t>(share) >= shares.size())
      throw std::invalid_argument("a table's share does not exist");
  }
  return shares;
}

TierLane::TierLane(const LaneConfig& config)
    : config_(config),
      shares_(SharesOf(config)),
      evicts_(std::any_of(shares_.begin(), shares_.end(),
                          [](const Share& share) { return static_cast<bool>(share.config.policy); })),
      capacity_(shares_.back().begin + shares_.back().config.capacity),
      limit_(static_cast<std::size_t>(capacity_ + config.overflow_slots)),
      row_(limit_),
      last_use_(limit_),
      dirty_(limit_),
      resident_(limit_),
      index_(&row_.data()->key, sizeof(Row) / sizeof(std::uint64_t), config.grows ? 0 : capacity_,
             StayingTables(), config.ids),
      table_rows_(config.share_of.size()) {
  if (capacity_ < 1) throw std::invalid_argument("a tier needs at least one slot");
  if (!config.grows) CommitSlots(capacity_);
}

std::vector<bool> TierLane::StayingTables() const {
  std::vector<bool> stays;
  for (const std::int32_t share : config_.share_of)
    stays.push_back(!shares_[static_cast<std::size_t>(share)].config.policy);
  return stays;
}

void TierLane::Prefetch(std::int32_t slot) const {
  __builtin_prefetch(&resident_[slot], 1);
  __builtin_prefetch(&row_[slot], 1);
  __builtin_prefetch(&last_use_[slot], 1);
  __builtin_prefetch(&dirty_[slot], 1);
}

void TierLane::Uses::Reserve(std::size_t rows) {
  slots.reserve(rows);
  keys.reserve(rows);
  next_use.reserve(rows);
}

void TierLane::Uses::Add(std::int32_t slot, std::uint64_t key, std::int64_t next) {
  slots.push_back(slot);
  keys.push_back(key);
  next_use.push_back(next);
}

void TierLane::Tell(PolicyHooks::Use hook, const Share& share, const Uses& uses, std::int64_t now) {
  if (uses.size() == 0) return;
  const Stopwatch watch(&policy_seconds_);
  hook(share.config.policy.state, uses.slots.data(), uses.keys.data(), uses.next_use.data(), uses.size(),
       now);
}

void TierLane::CommitSlots(std::int64_t slots) {
  if (slots <= committed_) return;
  const auto size = std::min(static_cast<std::size_t>(slots + (kGrowthStep >> config_.ids.bits)), limit_);
  row_.Commit(size);
  last_use_.Commit(size);
  dirty_.Commit(size);
  resident_.Commit(size);
  committed_ = static_cast<std::int64_t>(size);
}

// Finds the block of keys from keys[from] on, and prefetches the data of their slots, if rows ever leave.
void TierLane::FindBlock(const std::uint64_t* keys, std::int64_t from, std::int64_t n, std::int32_t* slots,
                         bool last_use) const {
  const std::int64_t count = std::min(kBlock, n - from);
  index_.Find(keys + from, count, slots + from);
  if (!evicts_) return;
  for (std::int64_t i = from; i < from + count; ++i) {
    if (slots[i] < 0) continue;
    __builtin_prefetch(last_use ? static_cast<const void*>(&last_use_[slots[i]]) : &resident_[slots[i]], 1);
  }
}

void TierLane::Begin(const std::uint64_t* keys, std::int64_t n, std::int64_t now, bool absent,
                     LanePlan* plan) {
  plan->now = now;
  plan->slots.assign(static_cast<std::size_t>(n), -1);
  plan->next_use.resize(static_cast<std::size_t>(n), kNotKnown);

  std::vector<Uses> hits(shares_.size());
  const std::size_t tables = config_.share_of.size();
  plan->table_rows.assign(tables, 0);
  plan->table_hits.assign(tables, 0);
  for (std::int64_t i = 0; i < n; ++i) {
    if (i % kBlock == 0 && !absent) FindBlock(keys, i, n, plan->slots.data(), true);
    std::int32_t slot = plan->slots[i];
    const std::size_t table = KeyTable(keys[i]);
    if (table < tables) ++plan->table_rows[table];
    if (slot < 0) {
      if (plan->absent.empty()) {
        plan->misses.reserve(static_cast<std::size_t>(n));
        plan->absent.reserve(static_cast<std::size_t>(n));
      }
      plan->misses.push_back(static_cast<std::int32_t>(i));
      plan->absent.push_back(static_cast<std::int32_t>(i));
      continue;
    }
    if (slot >= capacity_) {
      const std::int64_t overflow = slot - capacity_;
      ++overflow_users_[overflow];
      row_[slot].next_use = plan->next_use[i];
      slot = overflow_home_[overflow];
      if (slot < 0) {
        plan->misses.push_back(static_cast<std::int32_t>(i));
        continue;
      }
    }
    if (table < tables) ++plan->table_hits[table];
    const std::size_t s = ShareOf(keys[i]);
    const Share& share = shares_[s];
    if (!share.config.policy) continue;  // its rows never leave, so nobody asks when they are used
    last_use_[slot] = std::max(last_use_[slot], now);
    row_[slot].next_use = plan->next_use[i];
    if (hits[s].size() == 0) hits[s].Reserve(static_cast<std::size_t>(n - i));
    hits[s].Add(static_cast<std::int32_t>(slot - share.begin), keys[i], plan->next_use[i]);
  }
  GroupMisses(keys, plan);
  plan->needed = plan->refused = 0;
  for (std::size_t s = 0; s < shares_.size(); ++s) {
    const Share& share = shares_[s];
    SharePlan& wanted = plan->shares[s];
    if (share.config.policy) Tell(share.config.policy.touch, share, hits[s], now);
    Admit(keys, share, &wanted, plan);
    const std::int64_t admitted = wanted.end - wanted.begin - wanted.refused;
    wanted.needed = std::max<std::int64_t>(0, admitted - share.available());
    plan->needed += wanted.needed;
    plan->refused += wanted.refused;
  }
}

// Orders the misses by share; within a share they stay in order of first occurrence.
void TierLane::GroupMisses(const std::uint64_t* keys, LanePlan* plan) const {
  plan->shares.assign(shares_.size(), {});
  if (shares_.size() > 1) {
    PageVector<std::int32_t> grouped(plan->misses.size());
    for (const std::int32_t miss : plan->misses) ++plan->shares[ShareOf(keys[miss])].end;
    std::int64_t at = 0;
    for (SharePlan& share : plan->shares) {
      share.begin = at;
      at += share.end;
      share.end = share.begin;
    }
    for (const std::int32_t miss : plan->misses) grouped[plan->shares[ShareOf(keys[miss])].end++] = miss;
    plan->misses.swap(grouped);
  } else {
    plan->shares[0].end = static_cast<std::int64_t>(plan->misses.size());
  }
}

void TierLane::Admit(const std::uint64_t* keys, const Share& share, SharePlan* wanted, LanePlan* plan) {
  const AdmissionHook& filter = share.config.filter;
  const PolicyHooks& policy = share.config.policy;
  const std::int64_t n = wanted->end - wanted->begin;
  if ((!filter && policy.admit == nullptr) || n == 0) return;
  std::int32_t* const misses = plan->misses.data() + wanted->begin;
  PageVector<std::uint64_t> missed;
  missed.reserve(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) missed.push_back(keys[misses[i]]);
  PageVector<std::uint8_t> admitted(static_cast<std::size_t>(n), 1);
  {
    const Stopwatch watch(&policy_seconds_);
    if (filter) filter.admit(filter.state, missed.data(), n, plan->now, admitted.data());
    if (policy.admit != nullptr) policy.admit(policy.state, missed.data(), n, plan->now, admitted.data());
  }
  PageVector<std::int32_t> refused;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (admitted[static_cast<std::size_t>(i)] != 0)
      misses[kept++] = misses[i];
    else
      refused.push_back(misses[i]);
  }
  std::copy(refused.begin(), refused.end(), misses + kept);
  wanted->refused = static_cast<std::int64_t>(refused.size());
}

PageVector<std::int32_t> LanePlan::Unplaced() const {
  PageVector<std::int32_t> unplaced;
  for (const SharePlan& share : shares) {
    for (std::int64_t i = share.end - share.refused - share.needed; i < share.end; ++i)
      unplaced.push_back(misses[static_cast<std::size_t>(i)]);
  }
  return unplaced;
}

// Returns -1 when the share is full.
std::int32_t TierLane::TakeSlot(Share* share) {
  if (!share->free.empty()) {
    const std::int32_t slot = share->free.back();
    share->free.pop_back();
    return slot;
  }
  if (share->fresh == share->config.capacity) return -1;
  const std::int64_t slot = share->begin + share->fresh;
  CommitSlots(slot + 1);
  ++share->fresh;  // last: meanwhile DirtyRows reads the slots below
  return static_cast<std::int32_t>(slot);
}

std::int64_t TierLane::Prepare(bool use_overflow, const LanePlan& plan) {
  const auto admitted = static_cast<std::int64_t>(plan.misses.size()) - plan.refused;
  if (config_.grows) CommitSlots(std::min(capacity_, shares_[0].fresh + admitted));
  const std::int64_t past = use_overflow ? plan.needed + plan.refused : 0;
  const std::int64_t fresh = past - static_cast<std::int64_t>(overflow_free_.size());
  if (fresh <= 0) return committed_;
  const auto overflow = static_cast<std::int64_t>(overflow_users_.size()) + fresh;
  if (overflow > config_.overflow_slots) {
    throw OverflowFull("the rows in use at once exceed the tier's " + std::to_string(capacity_) +
                       " slots by " + std::to_string(overflow) + ", and there is address space for " +
                       std::to_string(config_.overflow_slots) + " overflow slots");
  }
  CommitSlots(capacity_ + overflow);
  return committed_;
}

void TierLane::Assign(const std::uint64_t* keys, bool use_overflow, LanePlan* plan) {
  const PageVector<std::int32_t>& gone = plan->victims.slots;
  index_.Erase(gone.data(), static_cast<std::int64_t>(gone.size()));
  for (auto slot = gone.rbegin(); slot != gone.rend(); ++slot)
    shares_[ShareOf(row_[*slot].key)].free.push_back(*slot);

  PageVector<std::int32_t> indexed;
  indexed.reserve(plan->misses.size());
  for (std::size_t s = 0; s < shares_.size(); ++s) {
    Share& share = shares_[s];
    const SharePlan& wanted = plan->shares[s];
    Uses inserted;
    if (share.config.policy) inserted.Reserve(static_cast<std::size_t>(wanted.end - wanted.begin));
    for (std::int64_t i = wanted.begin; i < wanted.end; ++i) {
      if (share.free.size() > kAhead) Prefetch(share.free[share.free.size() - 1 - kAhead]);
      const std::int32_t miss = plan->misses[static_cast<std::size_t>(i)];
      const std::int32_t in_overflow = plan->slots[miss];  // -1: absent
      std::int32_t slot = i < wanted.end - wanted.refused ? TakeSlot(&share) : -1;
      if (slot < 0) {
        if (in_overflow >= 0) continue;  // stays there
        if (!use_overflow) continue;     // its slot stays -1
        slot = TakeOverflowSlot();
        overflow_users_[slot - capacity_] = 1;
      } else if (share.config.policy) {
        inserted.Add(static_cast<std::int32_t>(slot - share.begin), keys[miss], plan->next_use[miss]);
      }
      row_[slot].key = keys[miss];
      last_use_[slot] = plan->now;
      row_[slot].next_use = plan->next_use[miss];
      dirty_[slot] = 0;
      if (slot < capacity_) CountRow(keys[miss], 1);
      if (in_overflow >= 0) {
        overflow_home_[in_overflow - capacity_] = slot;
        resident_[slot] = kExpected;
        continue;
      }
      plan->slots[miss] = slot;
      resident_[slot] = kRow;
      indexed.push_back(slot);
    }
    if (share.config.policy) Tell(share.config.policy.insert, share, inserted, plan->now);
  }
  index_.Insert(indexed.data(), static_cast<std::int64_t>(indexed.size()));
}

void TierLane::Remove(const std::int32_t* slots, std::int64_t n) {
  index_.Erase(slots, n);
  std::vector<PageVector<std::int32_t>> gone(shares_.size());
  for (std::int64_t i = 0; i < n; ++i) {
    resident_[slots[i]] = kEmpty;
    CountRow(row_[slots[i]].key, -1);
    const std::size_t s = ShareOf(row_[slots[i]].key);
    shares_[s].free.push_back(slots[i]);
    gone[s].push_back(static_cast<std::int32_t>(slots[i] - shares_[s].begin));
  }
  for (std::size_t s = 0; s < shares_.size(); ++s) {
    const PolicyHooks& policy = shares_[s].config.policy;
    if (!policy || gone[s].empty()) continue;
    const Stopwatch watch(&policy_seconds_);
    policy.remove(policy.state, gone[s].data(), static_cast<std::int64_t>(gone[s].size()));
  }
}

PageVector<std::uint64_t> TierLane::Announce(const std::uint64_t* keys, std::int64_t n, std::int64_t next_use,
                                             std::int64_t now) {
  PageVector<std::int32_t> slots(static_cast<std::size_t>(n));
  PageVector<std::uint64_t> absent;
  std::vector<PageVector<std::int32_t>> announced(shares_.size());
  for (std::int64_t i = 0; i < n; ++i) {
    if (i % kBlock == 0) FindBlock(keys, i, n, slots.data(), false);
    std::int32_t slot = slots[i];
    if (slot < 0) {
      absent.push_back(keys[i]);
      continue;
    }
    const std::size_t s = ShareOf(keys[i]);
    if (slot < capacity_ && !shares_[s].config.policy) continue;  // it never leaves
    row_[slot].next_use = next_use;
    if (slot >= capacity_) {
      slot = overflow_home_[slot - capacity_];
      if (slot < 0) continue;
      row_[slot].next_use = next_use;
    }
    if (shares_[s].config.policy && Resident(slot))
      announced[s].push_back(static_cast<std::int32_t>(slot - shares_[s].begin));
  }
  for (std::size_t s = 0; s < shares_.size(); ++s) {
    if (announced[s].empty()) continue;
    const PolicyHooks& policy = shares_[s].config.policy;
    const PageVector<std::int64_t> uses(announced[s].size(), next_use);
    const Stopwatch watch(&policy_seconds_);
    policy.announce(policy.state, announced[s].data(), uses.data(),
                    static_cast<std::int64_t>(announced[s].size()), now);
  }
  return absent;
}

void TierLane::MarkDirty(const std::int32_t* slots, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dirty_[slots[i]] = 1;
}

void TierLane::MarkClean(const std::int32_t* slots, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dirty_[slots[i]] = 0;
}

void TierLane::SetDirty(const std::int32_t* slots, const std::uint8_t* dirty, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dirty_[slots[i]] = dirty[i];
}

PageVector<std::int32_t> TierLane::ResidentSlots(bool only_dirty, std::int64_t from,
                                                 std::int64_t limit) const {
  PageVector<std::int32_t> slots;
  const auto collect = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t slot = std::max(begin, from); slot < end; ++slot) {
      if (static_cast<std::int64_t>(slots.size()) == limit) return;
      if (HasRow(static_cast<std::int32_t>(slot), only_dirty))
        slots.push_back(static_cast<std::int32_t>(slot));
    }
  };
  for (const Share& share : shares_) collect(share.begin, share.begin + share.fresh);
  collect(capacity_, capacity_ + static_cast<std::int64_t>(overflow_users_.size()));
  return slots;
}

std::int64_t TierLane::DirtyRows() const {
  std::atomic<std::int64_t> rows{0};
  const auto count = [&](std::int64_t first, std::int64_t past) {
    ParallelFor(first, past, kFlagsOfThread, [&](std::int64_t begin, std::int64_t end) {
      const std::uint8_t *const resident = resident_.data(), *const dirty = dirty_.data();
      std::int64_t own = 0;
      for (std::int64_t slot = begin; slot < end; ++slot)
        own += (resident[slot] == kRow) & (dirty[slot] != 0);
      rows += own;
    });
  };
  for (const Share& share : shares_) count(share.begin, share.begin + share.fresh);
  count(capacity_, capacity_ + static_cast<std::int64_t>(overflow_users_.size()));
  return rows;
}

std::int64_t TierLane::metadata_bytes() const {
  std::int64_t fresh = 0;
  for (const Share& share : shares_) fresh += share.fresh;
  return index_.memory_bytes() +
         static_cast<std::int64_t>(static_cast<double>(fresh) * (kBytesPerSlot - SlotIndex::kBytesPerSlot));
}

}  // namespace tierstore
