#include "cache/window.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "cache/policy.h"
#include "common/key.h"
#include "common/thread_pool.h"

namespace tierstore {
namespace {
// So many accesses to memory are begun before the first of them is waited for.
constexpr std::size_t kBlock = 32;
constexpr std::size_t kLeastEntries = 64;  // of a shard
// Threads share lookups of so many unique keys.
constexpr std::size_t kParallelFrom = 1 << 14;
}  // namespace

std::size_t WindowShard::Home(std::uint64_t key) const {
  return HomePlace(static_cast<std::uint32_t>(HashKey(key) >> 32), entries_.size());
}

// Other bits than those of Home.
std::size_t WindowShard::ShardOf(std::uint64_t key) { return HashKey(key) % kShards; }

PageVector<WindowShard::Entry> WindowShard::Live(std::uint32_t first, std::size_t lookups) const {
  PageVector<Entry> live;
  for (const Entry& entry : entries_) {
    if (entry.index != kEmpty && entry.ordinal - first < lookups) live.push_back(entry);
  }
  return live;
}

PageVector<std::uint64_t> WindowShard::Keys(std::uint32_t first, std::size_t lookups) const {
  PageVector<std::uint64_t> keys;
  for (const Entry& entry : Live(first, lookups)) keys.push_back(entry.key);
  return keys;
}

std::vector<WindowShard> WindowShard::Divided(std::uint32_t first, std::size_t lookups) const {
  std::array<PageVector<Entry>, kShards> divided;
  for (const Entry& entry : Live(first, lookups)) divided[ShardOf(entry.key)].push_back(entry);
  std::vector<WindowShard> shards(kShards);
  for (std::size_t shard = 0; shard < kShards; ++shard) shards[shard].Rebuild(divided[shard], 0);
  return shards;
}

void WindowShard::Rebuild(const PageVector<Entry>& live, std::size_t extra) {
  const std::size_t wanted = std::max(kLeastEntries, (live.size() + extra) * 5 / 3);
  if (wanted <= entries_.size() && entries_.size() < 2 * wanted)  // as a rule: its pages are there
    entries_.Fill(Entry{});
  else
    entries_ = OwnArray<Entry>(wanted + wanted / 16, Entry{});
  for (const Entry& entry : live) {
    std::size_t at = Home(entry.key);
    while (entries_[at].index != kEmpty) at = Next(at);
    entries_[at] = entry;
  }
  used_ = live.size();
}

void WindowShard::Add(const Added& added, const std::int32_t* positions, std::size_t keys,
                      std::vector<std::int64_t>* superseded) {
  const std::size_t count = added.before.size();
  // At most 3/4 full, dead entries included, so that probe runs stay short and always end.
  if ((used_ + keys) * 4 > entries_.size() * 3) Rebuild(Live(added.first, count), keys);
  const std::uint32_t first = added.first, ordinal = first + static_cast<std::uint32_t>(count);
  Entry* const entries = entries_.data();
  std::size_t homes[kBlock];
  std::int32_t block[kBlock];
  for (std::size_t begin = 0; begin < keys; begin += kBlock) {
    const std::size_t n = std::min(kBlock, keys - begin);
    for (std::size_t i = 0; i < n; ++i) {
      block[i] = positions == nullptr ? static_cast<std::int32_t>(begin + i) : positions[begin + i];
      homes[i] = Home(added.keys[block[i]]);
      __builtin_prefetch(&entries[homes[i]], 1);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const Entry& entry = entries[homes[i]];
      const std::uint32_t lookup = entry.ordinal - first;
      if (lookup < count && entry.index != kEmpty)
        __builtin_prefetch(&added.before[lookup]->next[entry.index], 1);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t key = added.keys[block[i]];
      Entry* dead = nullptr;
      Entry* entry = &entries[homes[i]];
      while (entry->index != kEmpty && entry->key != key) {
        if (dead == nullptr && entry->ordinal - first > count) dead = entry;
        entry = &entries[Next(static_cast<std::size_t>(entry - entries))];
      }
      const std::uint32_t lookup = entry->ordinal - first;
      if (entry->index != kEmpty && lookup < count) {
        added.before[lookup]->next[entry->index] = static_cast<std::int32_t>(ordinal - entry->ordinal);
        ++(*superseded)[lookup];
      } else {
        added.first_seen[block[i]] = 1;
        if (entry->index == kEmpty) {
          if (dead != nullptr)
            entry = dead;
          else
            ++used_;
        }
      }
      *entry = {key, ordinal, static_cast<std::uint32_t>(block[i])};
    }
  }
}

void WindowShard::Clear() {
  entries_.Fill(Entry{});
  used_ = 0;
}

void Window::AddShards(const WindowShard::Added& added, std::size_t keys) {
  const std::size_t before = added.before.size();
  std::vector<std::vector<std::int64_t>> superseded(shards_.size(), std::vector<std::int64_t>(before));
  if (shards_.size() == 1) {
    shards_[0].Add(added, nullptr, keys, &superseded[0]);
  } else {
    std::vector<PageVector<std::int32_t>> positions(shards_.size());
    for (PageVector<std::int32_t>& own : positions) own.reserve(keys / shards_.size() * 9 / 8);
    for (std::size_t i = 0; i < keys; ++i)
      positions[WindowShard::ShardOf(added.keys[i])].push_back(static_cast<std::int32_t>(i));
    const auto shards = static_cast<std::int64_t>(shards_.size());
    ParallelFor(0, shards, keys < kParallelFrom ? shards : 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto shard = static_cast<std::size_t>(begin); shard < static_cast<std::size_t>(end); ++shard)
        shards_[shard].Add(added, positions[shard].data(), positions[shard].size(), &superseded[shard]);
    });
  }
  for (const std::vector<std::int64_t>& of_shard : superseded) {
    for (std::size_t lookup = 0; lookup < before; ++lookup) added.before[lookup]->latest -= of_shard[lookup];
  }
}

PageVector<std::uint64_t> Window::Announce(std::int64_t seq, std::shared_ptr<const Batch> batch) {
  if (!pending_.empty() && pending_.back().seq >= seq)
    throw std::logic_error("window: sequence does not increase");
  const PageVector<std::uint64_t>& keys = batch->unique;
  PageVector<std::uint8_t> first_seen(keys.size(), 0);
  WindowShard::Added added = {keys.data(), {}, first_ordinal_, first_seen.data()};
  for (PendingLookup& pending : pending_) added.before.push_back(&pending);
  pending_.push_back(
      {seq, batch, PageVector<std::int32_t>(keys.size()), static_cast<std::int64_t>(keys.size())});

  if (shards_.size() == 1 && keys.size() >= kParallelFrom && NumThreads() > 1)
    shards_ = shards_[0].Divided(first_ordinal_, added.before.size());
  AddShards(added, keys.size());
  PageVector<std::uint64_t> seen;
  seen.reserve(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (first_seen[i] != 0) seen.push_back(keys[i]);
  }
  live_ += static_cast<std::int64_t>(seen.size());
  return seen;
}

PageVector<std::int64_t> Window::Take(std::int64_t seq) {
  if (pending_.empty() || pending_.front().seq != seq) throw std::logic_error("window: taken out of order");
  const PendingLookup& front = pending_.front();
  std::vector<std::int64_t> uses;  // by how many lookups later
  uses.reserve(pending_.size());
  for (const PendingLookup& pending : pending_) uses.push_back(pending.seq);
  uses[0] = kNotKnown;
  PageVector<std::int64_t> next_use;
  next_use.reserve(front.next.size());
  for (const std::int32_t later : front.next) next_use.push_back(uses[static_cast<std::size_t>(later)]);
  live_ -= front.latest;  // its entries are dead from now on: their ordinal is out of range
  pending_.pop_front();
  ++first_ordinal_;
  return next_use;
}

PageVector<std::uint64_t> Window::Clear() {
  PageVector<std::uint64_t> keys;
  for (WindowShard& shard : shards_) {
    const PageVector<std::uint64_t> own = shard.Keys(first_ordinal_, pending_.size());
    keys.insert(keys.end(), own.begin(), own.end());
    shard.Clear();
  }
  std::sort(keys.begin(), keys.end());  // not in the order of hashes, which differs from process to process
  first_ordinal_ += static_cast<std::uint32_t>(pending_.size());
  pending_.clear();
  live_ = 0;
  return keys;
}

std::int64_t Window::memory_bytes() const {
  std::int64_t bytes = 0;
  for (const WindowShard& shard : shards_) bytes += shard.memory_bytes();
  for (const PendingLookup& pending : pending_) {
    bytes += static_cast<std::int64_t>(pending.batch->unique.size() *
                                           (sizeof(std::uint64_t) + sizeof(std::int32_t)) +
                                       pending.batch->inverse.size() * sizeof(std::int32_t));
  }
  return bytes;
}

}  // namespace tierstore
