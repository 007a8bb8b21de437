#include "cache/tier.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

namespace tierstore {
namespace {
// Memory is made accessible in steps of so many slots; pages cost nothing before they are written.
constexpr std::int64_t kGrowthStep = 4096;
// Slots are in no order: what so many of them have is fetched before it is needed.
constexpr std::int64_t kBlock = 128, kAhead = 24;

// Adds the time from its making to its end.
class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Stopwatch() { *seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double* seconds_;
  Clock::time_point begin_;
};
}  // namespace

Tier::Tier(const TierConfig& config)
    : config_(config),
      limit_(static_cast<std::size_t>(config.capacity + config.pad)),
      arena_(limit_ * static_cast<std::size_t>(config.row_bytes)),
      row_(limit_),
      last_use_(limit_),
      dirty_(limit_),
      resident_(limit_),
      index_(&row_.data()->key, sizeof(Row) / sizeof(std::uint64_t), config.grows ? 0 : config.capacity) {
  if (config.capacity < 1 || config.row_bytes < 16 || config.row_bytes % 16 != 0) {
    throw std::invalid_argument("a tier needs at least one slot, and rows of a multiple of 16 bytes");
  }
  if (!config.grows) CommitSlots(config.capacity);
}

void Tier::CommitSlots(std::int64_t slots) {
  if (slots <= committed_) return;
  const auto size = std::min(static_cast<std::size_t>(slots + kGrowthStep), limit_);
  arena_.Commit(size * static_cast<std::size_t>(config_.row_bytes));
  row_.Commit(size);
  last_use_.Commit(size);
  dirty_.Commit(size);
  resident_.Commit(size);
  committed_ = static_cast<std::int64_t>(size);
}

// Finds keys[from] and those behind it, a block, and begins to fetch what is kept of their slots.
void Tier::FindBlock(const std::uint64_t* keys, std::int64_t from, std::int64_t n, std::int32_t* slots,
                     bool last_use) const {
  const std::int64_t count = std::min(kBlock, n - from);
  index_.Find(keys + from, count, slots + from);
  for (std::int64_t i = from; i < from + count; ++i) {
    if (slots[i] < 0) continue;
    __builtin_prefetch(last_use ? static_cast<const void*>(&last_use_[slots[i]]) : &resident_[slots[i]], 1);
  }
}

void Tier::Begin(const std::uint64_t* keys, const std::int64_t* next_use, std::int64_t n, std::int64_t now,
                 bool absent, Plan* plan) {
  plan->now = now;
  plan->slots.assign(static_cast<std::size_t>(n), -1);
  if (next_use != nullptr)
    plan->next_use.assign(next_use, next_use + n);
  else
    plan->next_use.assign(static_cast<std::size_t>(n), kNotKnown);

  PageVector<std::int32_t> hits;
  PageVector<std::uint64_t> hit_keys;
  PageVector<std::int64_t> hit_next;
  hits.reserve(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    if (i % kBlock == 0 && !absent) FindBlock(keys, i, n, plan->slots.data(), true);
    std::int32_t slot = plan->slots[i];
    if (slot < 0) {
      plan->misses.push_back(static_cast<std::int32_t>(i));
      plan->absent.push_back(static_cast<std::int32_t>(i));
      continue;
    }
    if (slot >= config_.capacity) {
      const std::int64_t pad = slot - config_.capacity;
      ++pad_users_[pad];
      row_[slot].next_use = plan->next_use[i];
      slot = pad_home_[pad];
      if (slot < 0) {
        plan->misses.push_back(static_cast<std::int32_t>(i));
        continue;
      }
    }
    last_use_[slot] = std::max(last_use_[slot], now);
    row_[slot].next_use = plan->next_use[i];
    if (config_.policy) {
      hits.push_back(slot);
      hit_keys.push_back(keys[i]);
      hit_next.push_back(plan->next_use[i]);
    }
  }
  if (!hits.empty()) {
    const Stopwatch watch(&policy_seconds_);
    config_.policy.touch(config_.policy.state, hits.data(), hit_keys.data(), hit_next.data(),
                         static_cast<std::int64_t>(hits.size()), now);
  }
  if ((config_.filter || config_.policy.admit != nullptr) && !plan->misses.empty()) Admit(keys, plan);
  const auto available = static_cast<std::int64_t>(free_.size()) + config_.capacity - fresh_;
  const auto admitted = static_cast<std::int64_t>(plan->misses.size()) - plan->refused;
  plan->needed = std::max<std::int64_t>(0, admitted - available);
}

void Tier::Admit(const std::uint64_t* keys, Plan* plan) {
  PageVector<std::int32_t>& misses = plan->misses;
  const auto n = static_cast<std::int64_t>(misses.size());
  PageVector<std::uint64_t> missed;
  missed.reserve(misses.size());
  for (const std::int32_t miss : misses) missed.push_back(keys[miss]);
  PageVector<std::uint8_t> admitted(misses.size(), 1);
  {
    const Stopwatch watch(&policy_seconds_);
    if (config_.filter)
      config_.filter.admit(config_.filter.state, missed.data(), n, plan->now, admitted.data());
    if (config_.policy.admit != nullptr)
      config_.policy.admit(config_.policy.state, missed.data(), n, plan->now, admitted.data());
  }
  PageVector<std::int32_t> refused;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < misses.size(); ++i) {
    if (admitted[i] != 0)
      misses[kept++] = misses[i];
    else
      refused.push_back(misses[i]);
  }
  std::copy(refused.begin(), refused.end(), misses.begin() + static_cast<std::ptrdiff_t>(kept));
  plan->refused = static_cast<std::int64_t>(refused.size());
}

std::string Tier::Fault(std::int32_t slot, std::int64_t pinned_since) const {
  if (slot < 0 || slot >= config_.capacity) return "does not exist";
  if (!Resident(slot)) return "holds no row or was returned twice";
  if (last_use_[slot] >= pinned_since) return "is pinned: a batch in flight uses its row";
  return {};
}

void Tier::Prefetch(std::int32_t slot) const {
  __builtin_prefetch(&resident_[slot], 1);
  __builtin_prefetch(&row_[slot]);
  __builtin_prefetch(&last_use_[slot]);
  __builtin_prefetch(&dirty_[slot]);
}

void Tier::TakeVictim(std::int32_t slot, Departures* victims) {
  // Empty, but found by the index until Assign: reads go on while the row is copied out.
  resident_[slot] = kEmpty;
  victims->slots.push_back(slot);
  victims->keys.push_back(row_[slot].key);
  victims->dirty.push_back(dirty_[slot]);
  victims->next_use.push_back(row_[slot].next_use);
}

std::int64_t Tier::Evict(std::int64_t pinned_since, Plan* plan) {
  if (plan->needed == 0 || !config_.policy) return plan->needed;
  PageVector<std::int32_t> chosen(static_cast<std::size_t>(plan->needed));
  const std::int64_t found = [&] {
    const Stopwatch watch(&policy_seconds_);
    return config_.policy.evict(config_.policy.state, plan->needed, last_use_.data(), pinned_since,
                                chosen.data());
  }();
  if (found < 0 || found > plan->needed) {
    throw PolicyFault("evict() returned " + std::to_string(found) + " where it was asked for up to " +
                      std::to_string(plan->needed) + " slots");
  }
  chosen.resize(static_cast<std::size_t>(found));
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (i + kAhead < chosen.size()) Prefetch(chosen[i + kAhead]);
    const std::string fault = Fault(chosen[i], pinned_since);
    if (fault.empty()) {
      TakeVictim(chosen[i], &plan->victims);
      continue;
    }
    // The policy has dropped the others too: Abort gives them back to it.
    for (std::size_t j = i; j < chosen.size(); ++j) {
      const std::int32_t slot = chosen[j];
      if (slot >= 0 && slot < config_.capacity && resident_[slot] == kRow) TakeVictim(slot, &plan->victims);
    }
    throw PolicyFault("evict() returned slot " + std::to_string(chosen[i]) + ", which " + fault);
  }
  plan->needed -= found;
  return plan->needed;
}

// -1 when the tier is full.
std::int32_t Tier::TakeSlot() {
  if (!free_.empty()) {
    const std::int32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  if (fresh_ == config_.capacity) return -1;
  CommitSlots(fresh_ + 1);
  return static_cast<std::int32_t>(fresh_++);
}

void Tier::Prepare(bool use_pad, const Plan& plan) {
  const auto admitted = static_cast<std::int64_t>(plan.misses.size()) - plan.refused;
  CommitSlots(std::min(config_.capacity, fresh_ + admitted));
  const std::int64_t past = use_pad ? plan.needed + plan.refused : 0;
  const std::int64_t fresh = past - static_cast<std::int64_t>(pad_free_.size());
  if (fresh <= 0) return;
  const auto pad = static_cast<std::int64_t>(pad_users_.size()) + fresh;
  if (pad > config_.pad) {
    throw PadFull("the rows in use at once exceed the tier's " + std::to_string(config_.capacity) +
                  " slots by " + std::to_string(pad) + ", and there is address space for " +
                  std::to_string(config_.pad) + " of them");
  }
  CommitSlots(config_.capacity + pad);
}

void Tier::Assign(const std::uint64_t* keys, bool use_pad, Plan* plan) {
  index_.Erase(plan->victims.slots.data(), static_cast<std::int64_t>(plan->victims.slots.size()));
  free_.insert(free_.end(), plan->victims.slots.rbegin(), plan->victims.slots.rend());

  PageVector<std::int32_t> slots, indexed;
  PageVector<std::uint64_t> inserted;
  PageVector<std::int64_t> next_use;
  indexed.reserve(plan->misses.size());
  const std::size_t admitted = plan->misses.size() - static_cast<std::size_t>(plan->refused);
  for (std::size_t i = 0; i < plan->misses.size(); ++i) {
    const std::int32_t miss = plan->misses[i];
    const std::int32_t in_pad = plan->slots[miss];  // -1: absent
    std::int32_t slot = i < admitted ? TakeSlot() : -1;
    if (slot < 0) {
      if (in_pad >= 0) continue;  // stays there
      if (!use_pad) continue;     // its slot stays -1
      slot = TakePadSlot();
      pad_users_[slot - config_.capacity] = 1;
    } else if (config_.policy) {
      slots.push_back(slot);
      inserted.push_back(keys[miss]);
      next_use.push_back(plan->next_use[miss]);
    }
    row_[slot].key = keys[miss];
    last_use_[slot] = plan->now;
    row_[slot].next_use = plan->next_use[miss];
    dirty_[slot] = 0;
    if (in_pad >= 0) {
      pad_home_[in_pad - config_.capacity] = slot;
      resident_[slot] = kExpected;
      continue;
    }
    plan->slots[miss] = slot;
    resident_[slot] = kRow;
    indexed.push_back(slot);
  }
  index_.Insert(indexed.data(), static_cast<std::int64_t>(indexed.size()));
  if (!slots.empty()) {
    const Stopwatch watch(&policy_seconds_);
    config_.policy.insert(config_.policy.state, slots.data(), inserted.data(), next_use.data(),
                          static_cast<std::int64_t>(slots.size()), plan->now);
  }
}

void Tier::Abort(Plan* plan) {
  const Departures& victims = plan->victims;
  for (const std::int32_t slot : victims.slots) resident_[slot] = kRow;
  if (!victims.slots.empty()) {
    config_.policy.insert(config_.policy.state, victims.slots.data(), victims.keys.data(),
                          victims.next_use.data(), static_cast<std::int64_t>(victims.slots.size()),
                          plan->now);
  }
  std::erase_if(plan->slots, [](std::int32_t slot) { return slot < 0; });
  Release(plan->slots.data(), static_cast<std::int64_t>(plan->slots.size()));
}

void Tier::Remove(const std::int32_t* slots, std::int64_t n) {
  index_.Erase(slots, n);
  for (std::int64_t i = 0; i < n; ++i) {
    resident_[slots[i]] = kEmpty;
    free_.push_back(slots[i]);
  }
  if (config_.policy && n > 0) {
    const Stopwatch watch(&policy_seconds_);
    config_.policy.remove(config_.policy.state, slots, n);
  }
}

PageVector<std::uint64_t> Tier::Announce(const std::uint64_t* keys, std::int64_t n, std::int64_t next_use,
                                         std::int64_t now) {
  PageVector<std::int32_t> slots(static_cast<std::size_t>(n));
  PageVector<std::uint64_t> absent;
  std::size_t kept = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (i % kBlock == 0) FindBlock(keys, i, n, slots.data(), false);
    std::int32_t slot = slots[i];
    if (slot < 0) {
      absent.push_back(keys[i]);
      continue;
    }
    row_[slot].next_use = next_use;
    if (slot >= config_.capacity) {
      slot = pad_home_[slot - config_.capacity];
      if (slot < 0) continue;
      row_[slot].next_use = next_use;
    }
    if (Resident(slot)) slots[kept++] = slot;
  }
  if (config_.policy && kept > 0) {
    const PageVector<std::int64_t> uses(kept, next_use);
    const Stopwatch watch(&policy_seconds_);
    config_.policy.announce(config_.policy.state, slots.data(), uses.data(), static_cast<std::int64_t>(kept),
                            now);
  }
  return absent;
}

void Tier::MarkDirty(const std::int32_t* slots, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dirty_[slots[i]] = 1;
}

void Tier::MarkClean(const std::int32_t* slots, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dirty_[slots[i]] = 0;
}

void Tier::SetDirty(const std::int32_t* slots, const std::uint8_t* dirty, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dirty_[slots[i]] = dirty[i];
}

PageVector<std::int32_t> Tier::ResidentSlots(bool only_dirty, std::int64_t from, std::int64_t limit) const {
  PageVector<std::int32_t> slots;
  const auto collect = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t slot = std::max(begin, from); slot < end; ++slot) {
      if (static_cast<std::int64_t>(slots.size()) == limit) return;
      if (resident_[static_cast<std::size_t>(slot)] == kRow && (dirty_[slot] || !only_dirty)) {
        slots.push_back(static_cast<std::int32_t>(slot));
      }
    }
  };
  collect(0, fresh_);
  collect(config_.capacity, config_.capacity + static_cast<std::int64_t>(pad_users_.size()));
  return slots;
}

std::int64_t Tier::metadata_bytes() const {
  return index_.memory_bytes() +
         static_cast<std::int64_t>(static_cast<double>(fresh_) * (kBytesPerSlot - SlotIndex::kBytesPerSlot));
}

}  // namespace tierstore
