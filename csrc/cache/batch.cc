#include "cache/batch.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "cache/probing.h"
#include "common/key.h"

namespace tierstore {
namespace {

constexpr std::int64_t kBlock = 32;

// Open addressing: an entry is (key, generation, index), so the table is cleared by counting up and its
// memory is kept from batch to batch.
class ScratchTable {
 public:
  struct ById {
    std::uint32_t generation = 0;
    std::uint32_t index = 0;
  };

  void Begin(std::int64_t keys) {
    // At most 2/3 full, if no key repeats.
    const std::size_t wanted = static_cast<std::size_t>(std::max<std::int64_t>(keys, 64)) * 3 / 2;
    if (wanted > entries_.size() || wanted * 16 < entries_.size()) {
      entries_ = PageVector<Entry>(wanted + wanted / 16);
    }
    if (++generation_ == 0) {
      std::fill(entries_.begin(), entries_.end(), Entry{});
      for (PageVector<ById>& table : by_id_) std::fill(table.begin(), table.end(), ById{});
      generation_ = 1;
    }
    keys_.clear();
  }

  // An entry per id of a small table, where there is room for such; else null. A table has the same in all
  // segments of a batch, since room only grows scarce.
  ById* OfTable(std::uint32_t table, std::int64_t bound) {
    if (bound > kSmallBound) return nullptr;
    const auto size = static_cast<std::size_t>(bound);
    if (table < by_id_.size() && by_id_[table].size() >= size) return by_id_[table].data();
    if (table >= kSmallTables || small_ids_ + size > kSmallIds) return nullptr;
    if (table >= by_id_.size()) by_id_.resize(table + 1);
    small_ids_ += size - by_id_[table].size();
    by_id_[table].resize(size);
    return by_id_[table].data();
  }
  std::int32_t FindOrAdd(ById* entry, std::uint64_t key) {
    if (entry->generation != generation_) {
      *entry = {generation_, static_cast<std::uint32_t>(keys_.size())};
      keys_.push_back(key);
    }
    return static_cast<std::int32_t>(entry->index);
  }
  void Prefetch(std::uint64_t hash) const { __builtin_prefetch(&entries_[Home(hash)], 1); }

  std::int32_t FindOrAdd(std::uint64_t key, std::uint64_t hash) {
    for (std::size_t at = Home(hash);; at = NextPlace(at, entries_.size())) {
      Entry& entry = entries_[at];
      if (entry.generation != generation_) {
        entry = {key, generation_, static_cast<std::uint32_t>(keys_.size())};
        keys_.push_back(key);
        return static_cast<std::int32_t>(entry.index);
      }
      if (entry.key == key) return static_cast<std::int32_t>(entry.index);
    }
  }
  const std::vector<std::uint64_t>& keys() const { return keys_; }

 private:
  struct Entry {
    std::uint64_t key = 0;
    std::uint32_t generation = 0;
    std::uint32_t index = 0;
  };
  std::size_t Home(std::uint64_t hash) const {
    return HomePlace(static_cast<std::uint32_t>(hash >> 32), entries_.size());
  }

  static constexpr std::int64_t kSmallBound = 1 << 13;
  static constexpr std::uint32_t kSmallTables = 1 << 12;
  static constexpr std::size_t kSmallIds = std::size_t{1} << 19;  // 4 MiB

  std::vector<PageVector<ById>> by_id_;
  std::size_t small_ids_ = 0;
  std::vector<std::uint64_t> keys_;  // unique, in order of first occurrence
  PageVector<Entry> entries_;
  std::uint32_t generation_ = 0;
};

// A table per thread that deduplicates now: each is as large as the largest batch so far.
class Borrowed {
 public:
  Borrowed() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      table_ = std::make_unique<ScratchTable>();
    } else {
      table_ = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  ~Borrowed() {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(table_));
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ScratchTable& operator*() const { return *table_; }

 private:
  static inline std::mutex mutex_;
  static inline std::vector<std::unique_ptr<ScratchTable>> idle_;
  std::unique_ptr<ScratchTable> table_;
};

template <typename Id>
BadId AddSegment(const IdSegment& segment, std::int64_t number, ScratchTable* table, std::int32_t* inverse) {
  const Id* ids = static_cast<const Id*>(segment.ids);
  const auto bound = static_cast<std::uint64_t>(segment.bound);
  ScratchTable::ById* const by_id = table->OfTable(segment.table, segment.bound);
  if (by_id != nullptr) {
    for (std::int64_t i = 0; i < segment.count; ++i) {
      const auto id = static_cast<std::int64_t>(ids[i]);
      if (static_cast<std::uint64_t>(id) >= bound) return {number, i, id};
      const bool skip = id == segment.padding;
      inverse[i] =
          skip ? -1 : table->FindOrAdd(&by_id[id], MakeKey(segment.table, static_cast<std::uint64_t>(id)));
    }
    return {};
  }
  std::uint64_t keys[kBlock], hashes[kBlock];
  for (std::int64_t begin = 0; begin < segment.count; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, segment.count - begin);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto id = static_cast<std::int64_t>(ids[begin + i]);
      if (static_cast<std::uint64_t>(id) >= bound) return {number, begin + i, id};
      keys[i] = MakeKey(segment.table, static_cast<std::uint64_t>(id));
      hashes[i] = HashKey(keys[i]);
      table->Prefetch(hashes[i]);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const bool skip = segment.padding >= 0 && KeyId(keys[i]) == static_cast<std::uint64_t>(segment.padding);
      inverse[begin + i] = skip ? -1 : table->FindOrAdd(keys[i], hashes[i]);
    }
  }
  return {};
}

}  // namespace

BadId Deduplicate(const std::vector<IdSegment>& segments, Batch* batch) {
  std::int64_t total = 0;
  for (const IdSegment& segment : segments) total += segment.count;
  if (total > std::numeric_limits<std::int32_t>::max()) {
    throw std::length_error("a lookup may have at most 2^31 - 1 ids; use smaller batches");
  }
  const Borrowed borrowed;
  ScratchTable& table = *borrowed;
  table.Begin(total);
  batch->unique.clear();
  batch->inverse.resize(static_cast<std::size_t>(total));
  std::int32_t* inverse = batch->inverse.data();
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto number = static_cast<std::int64_t>(s);
    const BadId bad = segments[s].is_int32 ? AddSegment<std::int32_t>(segments[s], number, &table, inverse)
                                           : AddSegment<std::int64_t>(segments[s], number, &table, inverse);
    if (bad.segment >= 0) return bad;
    inverse += segments[s].count;
  }
  batch->unique.assign(table.keys().begin(), table.keys().end());
  return {};
}

}  // namespace tierstore
