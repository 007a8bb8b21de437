#include "cache/window.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "cache/policy.h"
#include "common/thread_pool.h"

namespace tierstore {
namespace {
// This many accesses to memory are begun before the first of them is waited for.
constexpr std::size_t kBlock = 32;
constexpr std::size_t kLeastEntries = 64;  // of a shard

// Keys are sorted by so many bits at a time. Bits in which no two keys differ, as most bits of tables and
// ids, take no pass.
constexpr int kSortBits = 8;
constexpr std::uint64_t kSortMask = (std::uint64_t{1} << kSortBits) - 1;

// Copies keys, which differ in the bits `differ` at most, to `to` in increasing order.
void SortInto(std::span<const std::uint64_t> keys, std::uint64_t differ, std::uint64_t* to) {
  PageVector<std::uint64_t> from(keys.begin(), keys.end()), sorted(keys.size());
  while (differ != 0) {  // from the lowest bits on
    const int low = std::countr_zero(differ);
    std::array<std::size_t, kSortMask + 1> next = {};
    for (const std::uint64_t key : from) ++next[key >> low & kSortMask];
    std::size_t at = 0;
    for (std::size_t& begin : next) at += std::exchange(begin, at);
    for (const std::uint64_t key : from) sorted[next[key >> low & kSortMask]++] = key;
    from.swap(sorted);
    differ &= ~(kSortMask << low);
  }
  std::copy(from.begin(), from.end(), to);
}

// The highest bits divide many keys into parts that stay in the processor's cache, and threads take a part
// each.
void Sort(PageVector<std::uint64_t>* keys) {
  const auto n = static_cast<std::int64_t>(keys->size());
  if (n < kParallelKeys) return std::sort(keys->begin(), keys->end());
  std::uint64_t differ = 0;
  for (const std::uint64_t key : *keys) differ |= key ^ keys->front();
  const int high = std::max(0, static_cast<int>(std::bit_width(differ)) - kSortBits);
  const DividedKeys parts(keys->data(), n, kSortMask + 1,
                          [&](std::uint64_t key) { return key >> high & kSortMask; });
  differ &= (std::uint64_t{1} << high) - 1;
  ParallelFor(0, kSortMask + 1, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto part = static_cast<std::size_t>(begin); part < static_cast<std::size_t>(end); ++part)
      SortInto(parts.keys(part), differ, keys->data() + parts.begin(part));
  });
}
}  // namespace

NewestLookup::NewestLookup(std::deque<PendingLookup>* before, std::uint32_t first, std::size_t keys)
    : first_(first), first_seen_(keys, 0) {
  for (PendingLookup& pending : *before) before_.push_back(&pending);
}

PageVector<std::uint64_t> NewestLookup::FirstSeen(const PageVector<std::uint64_t>& keys) const {
  const auto n = static_cast<std::int64_t>(keys.size());
  const std::int64_t blocks = n < kParallelKeys ? 1 : NumThreads();
  const std::int64_t length = std::max<std::int64_t>(1, (n + blocks - 1) / blocks);
  std::vector<std::size_t> begin(static_cast<std::size_t>(blocks));  // of each block, its first key of all
  ParallelFor(0, n, length, [&](std::int64_t first, std::int64_t last) {
    begin[static_cast<std::size_t>(first / length)] =
        std::accumulate(first_seen_.begin() + first, first_seen_.begin() + last, std::size_t{0});
  });
  std::size_t count = 0;
  for (std::size_t& block : begin) count += std::exchange(block, count);
  PageVector<std::uint64_t> seen(count);
  ParallelFor(0, n, length, [&](std::int64_t first, std::int64_t last) {
    std::size_t at = begin[static_cast<std::size_t>(first / length)];
    for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(last); ++i) {
      if (first_seen_[i] != 0) seen[at++] = keys[i];
    }
  });
  return seen;
}

void NewestLookup::Count(const std::vector<std::int64_t>& superseded) {
  for (std::size_t lookup = 0; lookup < before_.size(); ++lookup)
    before_[lookup]->latest -= superseded[lookup];
}

std::vector<WindowShard> WindowShard::Divided(std::uint32_t first, std::size_t lookups) const {
  std::array<std::size_t, kShards> live = {};
  for (const Entry& entry : entries_) {
    if (entry.IsOf(first, lookups)) ++live[ShardOf(entry.key)];
  }
  std::vector<WindowShard> shards(kShards);
  for (std::size_t shard = 0; shard < kShards; ++shard)
    shards[shard].entries_ = OwnArray<Entry>(EntriesFor(live[shard]), Entry{});
  for (const Entry& entry : entries_) {
    if (entry.IsOf(first, lookups)) shards[ShardOf(entry.key)].Place(entry);
  }
  return shards;
}

std::size_t WindowShard::EntriesFor(std::size_t keys) { return std::max(kLeastEntries, keys * 5 / 3); }

void WindowShard::Place(const Entry& entry) {
  std::size_t at = Home(entry.key);
  while (entries_[at].index != kEmpty) at = Next(at);
  entries_[at] = entry;
  ++used_;
}

void WindowShard::RemoveDead(std::uint32_t first, std::size_t lookups) {
  if (entries_.size() == 0) return;
  used_ = 0;
  // Behind an empty place no probe run goes on, so every entry finds its new place at or before the old one.
  std::size_t at = 0;
  while (entries_[at].index != kEmpty) ++at;
  for (std::size_t i = 0; i < entries_.size(); ++i, at = Next(at)) {
    if (entries_[at].index == kEmpty) continue;
    const Entry entry = std::exchange(entries_[at], Entry{});
    if (entry.IsOf(first, lookups)) Place(entry);
  }
}

void WindowShard::MakeRoom(std::size_t keys, std::uint32_t first, std::size_t lookups) {
  const auto live = static_cast<std::size_t>(std::count_if(
      entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.IsOf(first, lookups); }));
  const std::size_t size = entries_.size(), wanted = EntriesFor(live + keys);
  if (wanted <= size && size < 2 * wanted)
    return RemoveDead(first, lookups);  // as a rule, since the pages are there already
  // The window still grows where next to no entries are dead.
  const std::size_t grown = used_ - live <= used_ / 8 ? 2 * size : 0;
  const OwnArray<Entry> old =
      std::exchange(entries_, OwnArray<Entry>(std::max(wanted + wanted / 16, grown), Entry{}));
  used_ = 0;
  for (const Entry& entry :
       old) {  // places are in the order of hashes, so this writes one place after another
    if (entry.IsOf(first, lookups)) Place(entry);
  }
}

WindowShard::Entry* WindowShard::Find(std::uint64_t key, std::size_t home, const NewestLookup& newest) {
  Entry* dead = nullptr;
  std::size_t at = home;
  for (; entries_[at].index != kEmpty; at = Next(at)) {
    Entry& entry = entries_[at];
    if (entry.key == key) return &entry;
    const bool is_live = entry.ordinal == newest.ordinal() || newest.IsBefore(entry.ordinal);
    if (dead == nullptr && !is_live) dead = &entry;
  }
  if (dead == nullptr) {
    ++used_;
    return &entries_[at];
  }
  dead->index = kEmpty;
  return dead;
}

void WindowShard::Add(NewKeys added, NewestLookup* newest, std::vector<std::int64_t>* superseded) {
  const std::size_t keys = added.keys.size();
  // At most 3/4 full, dead entries included, so that probe runs stay short and always end.
  if ((used_ + keys) * 4 > entries_.size() * 3) MakeRoom(keys, newest->first(), newest->lookups_before());
  std::size_t homes[kBlock];
  for (std::size_t begin = 0; begin < keys; begin += kBlock) {
    const std::size_t n = std::min(kBlock, keys - begin);
    for (std::size_t i = 0; i < n; ++i) {
      homes[i] = Home(added.keys[begin + i]);
      __builtin_prefetch(&entries_[homes[i]], 1);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const Entry& entry = entries_[homes[i]];
      if (entry.index != kEmpty && newest->IsBefore(entry.ordinal))
        __builtin_prefetch(newest->NextUse(entry.ordinal, entry.index), 1);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t key = added.keys[begin + i];
      const std::int32_t position = added.PositionOf(begin + i);
      Entry& entry = *Find(key, homes[i], *newest);
      if (entry.index != kEmpty && newest->IsBefore(entry.ordinal)) {
        newest->SetNextUse(entry.ordinal, entry.index);
        ++(*superseded)[entry.ordinal - newest->first()];
      } else {
        newest->SetFirst(position);
      }
      entry = {key, newest->ordinal(), static_cast<std::uint32_t>(position)};
    }
  }
}

void WindowShard::Clear() {
  entries_.Fill(Entry{});
  used_ = 0;
}

void WindowTables::Choose(std::span<const std::uint64_t> keys) {
  struct Used {
    std::uint64_t rows = 0, ids = 0;
  };
  std::vector<Used> used;
  for (const std::uint64_t key : keys) {
    if (KeyTable(key) >= used.size()) used.resize(KeyTable(key) + 1);
    Used& table = used[KeyTable(key)];
    ++table.rows;
    table.ids = std::max(table.ids, KeyId(key) + 1);
  }
  std::uint64_t entries = 0;
  for (std::size_t table = 0; table < used.size(); ++table) {
    const std::uint64_t ids = (used[table].ids + kIdsInLine - 1) / kIdsInLine * kIdsInLine;
    if (ids == 0 || ids > used[table].rows * kIdsPerRow || entries + ids > kMostEntries) continue;
    tables_.resize(table + 1);
    tables_[table] = {entries, ids};
    entries += ids;
  }
  if (entries > 0) entries_ = OwnArray<Entry>(entries, Entry{});
}

void WindowTables::Add(NewKeys added, NewestLookup* newest, std::vector<std::int64_t>* superseded) {
  for (std::size_t i = 0; i < added.keys.size(); ++i) {
    if (i + kBlock < added.keys.size()) __builtin_prefetch(EntryOf(added.keys[i + kBlock]), 1);
    Entry& entry = *EntryOf(added.keys[i]);
    const std::int32_t position = added.PositionOf(i);
    if (entry.index != kEmpty && newest->IsBefore(entry.ordinal)) {
      newest->SetNextUse(entry.ordinal, entry.index);
      ++(*superseded)[entry.ordinal - newest->first()];
    } else {
      newest->SetFirst(position);
    }
    entry = {newest->ordinal(), static_cast<std::uint32_t>(position)};
  }
}

void WindowTables::Clear() {
  tables_.clear();
  entries_ = {};
}

std::size_t Window::PartOf(std::uint64_t key) const {
  const std::size_t shards = shards_.size();
  if (tables_.Has(key)) return shards + KeyId(key) / WindowTables::kIdsInLine % shards;
  return shards == 1 ? 0 : WindowShard::ShardOf(key);
}

void Window::Add(const PageVector<std::uint64_t>& keys, NewestLookup* newest) {
  const std::size_t shards = shards_.size(), parts = tables_.empty() ? shards : 2 * shards;
  std::vector<std::vector<std::int64_t>> superseded(parts,
                                                    std::vector<std::int64_t>(newest->lookups_before()));
  if (parts == 1) {
    shards_[0].Add({keys, {}}, newest, &superseded[0]);
  } else {
    const auto n = static_cast<std::int64_t>(keys.size());
    const DividedKeys divided(keys.data(), n, parts, [this](std::uint64_t key) { return PartOf(key); });
    const auto count = static_cast<std::int64_t>(parts);
    ParallelFor(0, count, n < kParallelKeys ? count : 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto part = static_cast<std::size_t>(begin); part < static_cast<std::size_t>(end); ++part) {
        const NewKeys own = {divided.keys(part), divided.positions(part)};
        if (part < shards)
          shards_[part].Add(own, newest, &superseded[part]);
        else
          tables_.Add(own, newest, &superseded[part]);
      }
    });
  }
  for (const std::vector<std::int64_t>& of_part : superseded) newest->Count(of_part);
}

PageVector<std::uint64_t> Window::Announce(std::int64_t seq, std::shared_ptr<const Batch> batch) {
  if (!pending_.empty() && pending_.back().seq >= seq)
    throw std::logic_error("the window got lookup " + std::to_string(seq) + " after a later lookup");
  if (!knows_uses_) {
    pending_.push_back({seq, batch, {}, 0});
    pending_bytes_ += pending_.back().memory_bytes();
    CountBytes();
    return {};
  }
  const PageVector<std::uint64_t>& keys = batch->unique;
  NewestLookup newest(&pending_, first_ordinal_, keys.size());
  if (is_new_ && keys.size() >= static_cast<std::size_t>(kParallelKeys)) tables_.Choose(keys);
  is_new_ = false;
  pending_.push_back(
      {seq, batch, PageVector<std::int32_t>(keys.size(), 0), static_cast<std::int64_t>(keys.size())});
  pending_bytes_ += pending_.back().memory_bytes();
  if (shards_.size() == 1 && keys.size() >= static_cast<std::size_t>(kParallelKeys) && NumThreads() > 1)
    shards_ = shards_[0].Divided(first_ordinal_, newest.lookups_before());
  Add(keys, &newest);
  PageVector<std::uint64_t> seen = newest.FirstSeen(keys);
  live_ += static_cast<std::int64_t>(seen.size());
  CountBytes();
  return seen;
}

PageVector<std::int64_t> Window::Take(std::int64_t seq) {
  if (pending_.empty() || pending_.front().seq != seq)
    throw std::logic_error("the window's oldest lookup is not lookup " + std::to_string(seq));
  const PendingLookup& front = pending_.front();
  std::vector<std::int64_t> uses;  // by how many lookups later
  uses.reserve(pending_.size());
  for (const PendingLookup& pending : pending_) uses.push_back(pending.seq);
  uses[0] = kNotKnown;
  PageVector<std::int64_t> next_use(front.next.size());
  ParallelFor(0, static_cast<std::int64_t>(next_use.size()), kParallelKeys,
              [&](std::int64_t begin, std::int64_t end) {
                for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
                  next_use[i] = uses[static_cast<std::size_t>(front.next[i])];
              });
  live_ -= front.latest;  // its entries are dead from now on: their ordinal is out of range
  pending_bytes_ -= front.memory_bytes();
  pending_.pop_front();
  ++first_ordinal_;
  CountBytes();
  return next_use;
}

PageVector<std::uint64_t> Window::LatestKeys() const {
  const auto lookups = static_cast<std::int64_t>(pending_.size());
  std::vector<std::size_t> begins(pending_.size());  // of each lookup, its first key of all
  ParallelFor(0, lookups, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
      begins[i] = static_cast<std::size_t>(std::count(pending_[i].next.begin(), pending_[i].next.end(), 0));
  });
  std::size_t count = 0;
  for (std::size_t& begin : begins) count += std::exchange(begin, count);
  PageVector<std::uint64_t> keys(count);
  ParallelFor(0, lookups, 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      const PendingLookup& pending = pending_[i];
      std::size_t at = begins[i];
      for (std::size_t key = 0; key < pending.next.size(); ++key) {
        if (pending.next[key] == 0) keys[at++] = pending.batch->unique[key];
      }
    }
  });
  return keys;
}

PageVector<std::uint64_t> Window::Clear() {
  PageVector<std::uint64_t> keys = LatestKeys();
  // Policies learn of the keys in this order, and evict rows that are equal to them in the order in which
  // they learned of the rows: the order must be the same in every process.
  Sort(&keys);
  tables_.Clear();
  const auto shards = static_cast<std::int64_t>(shards_.size());
  ParallelFor(0, shards, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t shard = begin; shard < end; ++shard) shards_[static_cast<std::size_t>(shard)].Clear();
  });
  first_ordinal_ += static_cast<std::uint32_t>(pending_.size());
  pending_.clear();
  pending_bytes_ = live_ = 0;
  is_new_ = true;
  CountBytes();
  return keys;
}

void Window::CountBytes() {
  std::int64_t bytes = tables_.memory_bytes() + pending_bytes_;
  for (const WindowShard& shard : shards_) bytes += shard.memory_bytes();
  memory_bytes_.store(bytes, std::memory_order_relaxed);
}

}  // namespace tierstore
