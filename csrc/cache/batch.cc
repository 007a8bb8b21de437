#include "cache/batch.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "cache/probing.h"
#include "common/key.h"
#include "common/thread_pool.h"

namespace tierstore {
namespace {

constexpr std::int64_t kBlock = 32;
// Threads share the work of so many ids, and each has so many at least.
constexpr std::int64_t kParallelFrom = 1 << 16;
constexpr std::int64_t kLeastOfPart = 1 << 14;
constexpr std::int64_t kPartsPerThread = 4;  // since ids of large tables take longer

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

BadId Add(const IdSegment& segment, std::int64_t number, ScratchTable* table, std::int32_t* inverse) {
  return segment.is_int32 ? AddSegment<std::int32_t>(segment, number, table, inverse)
                          : AddSegment<std::int64_t>(segment, number, table, inverse);
}

std::int64_t CountOf(const std::vector<IdSegment>& segments) {
  std::int64_t total = 0;
  for (const IdSegment& segment : segments) total += segment.count;
  return total;
}

// The segments of some tables, which one thread deduplicates.
struct Part {
  struct Range {
    std::size_t segment;
    std::int64_t begin = 0, end = 0;  // its first occurrences among the part's keys
  };
  std::int64_t count = 0;  // ids
  std::vector<Range> ranges = {};
  BadId bad = {};
  PageVector<std::uint64_t> keys = {};
};

// All segments of a table are in one part. Tables go to the part with the fewest ids so far, the largest
// table first.
std::vector<Part> Divide(const std::vector<IdSegment>& segments, std::size_t most) {
  std::map<std::uint32_t, Part> tables;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    Part& table = tables[segments[s].table];
    table.count += segments[s].count;
    table.ranges.push_back({s});
  }
  std::vector<Part> by_size;
  for (auto& [number, table] : tables) by_size.push_back(std::move(table));
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const Part& a, const Part& b) { return a.count > b.count; });
  std::vector<Part> parts(std::min(most, by_size.size()));
  for (const Part& table : by_size) {
    Part& least = *std::min_element(parts.begin(), parts.end(),
                                    [](const Part& a, const Part& b) { return a.count < b.count; });
    least.count += table.count;
    least.ranges.insert(least.ranges.end(), table.ranges.begin(), table.ranges.end());
  }
  for (Part& part : parts) {
    std::sort(part.ranges.begin(), part.ranges.end(),
              [](const Part::Range& a, const Part::Range& b) { return a.segment < b.segment; });
  }
  return parts;
}

class Parallel {
 public:
  Parallel(const std::vector<IdSegment>& segments, Batch* batch, std::size_t parts)
      : segments_(segments), batch_(*batch), parts_(Divide(segments, parts)), first_(segments.size()) {
    std::int64_t position = 0;
    for (const IdSegment& segment : segments) {
      position_.push_back(position);
      position += segment.count;
    }
  }

  BadId Run() {
    ForParts([this](Part* part) { Deduplicate(part); });
    BadId bad;
    for (const Part& part : parts_) {
      if (part.bad.segment >= 0 && (bad.segment < 0 || part.bad.segment < bad.segment)) bad = part.bad;
    }
    if (bad.segment >= 0) return bad;
    NumberKeys();
    ForParts([this](Part* part) { Renumber(part); });
    return {};
  }

 private:
  template <typename Work>
  void ForParts(const Work& work) {
    ParallelFor(0, static_cast<std::int64_t>(parts_.size()), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) work(&parts_[static_cast<std::size_t>(i)]);
    });
  }

  void Deduplicate(Part* part) {
    const Borrowed borrowed;
    ScratchTable& table = *borrowed;
    table.Begin(part->count);
    for (Part::Range& range : part->ranges) {
      range.begin = static_cast<std::int64_t>(table.keys().size());
      part->bad = Add(segments_[range.segment], static_cast<std::int64_t>(range.segment), &table,
                      batch_.inverse.data() + position_[range.segment]);
      if (part->bad.segment >= 0) return;
      range.end = static_cast<std::int64_t>(table.keys().size());
    }
    part->keys.assign(table.keys().begin(), table.keys().end());
  }

  // The keys that each segment has first come in the order of segments.
  void NumberKeys() {
    for (const Part& part : parts_) {
      for (const Part::Range& range : part.ranges) first_[range.segment] = range.end - range.begin;
    }
    std::int64_t keys = 0;
    for (std::int64_t& first : first_) keys += std::exchange(first, keys);
    batch_.unique.resize(static_cast<std::size_t>(keys));
  }

  void Renumber(Part* part) {
    const auto shift = [&](const Part::Range& range) {
      return static_cast<std::int32_t>(first_[range.segment] - range.begin);
    };
    for (auto range = part->ranges.begin(); range != part->ranges.end(); ++range) {
      std::copy(part->keys.begin() + range->begin, part->keys.begin() + range->end,
                batch_.unique.begin() + first_[range->segment]);
      std::int32_t* const inverse = batch_.inverse.data() + position_[range->segment];
      for (std::int64_t i = 0; i < segments_[range->segment].count; ++i) {
        if (inverse[i] < 0) continue;
        if (inverse[i] >= range->begin) {
          inverse[i] += shift(*range);
          continue;
        }
        // An earlier segment of the table has had the key first.
        const auto after = std::upper_bound(
            part->ranges.begin(), range, inverse[i],
            [](std::int32_t key, const Part::Range& earlier) { return key < earlier.begin; });
        inverse[i] += shift(*std::prev(after));
      }
    }
  }

  const std::vector<IdSegment>& segments_;
  Batch& batch_;
  std::vector<Part> parts_;
  std::vector<std::int64_t> position_;  // where each segment begins
  std::vector<std::int64_t> first_;     // the number of the first key that each segment has first
};

}  // namespace

BadId Deduplicate(const std::vector<IdSegment>& segments, Batch* batch) {
  const std::int64_t total = CountOf(segments);
  if (total > std::numeric_limits<std::int32_t>::max()) {
    throw std::length_error("a lookup may have at most 2^31 - 1 ids; use smaller batches");
  }
  batch->unique.clear();
  batch->inverse.resize(static_cast<std::size_t>(total));
  const auto threads = static_cast<std::int64_t>(NumThreads());
  if (threads > 1 && segments.size() > 1 && total >= kParallelFrom) {
    const auto parts = static_cast<std::size_t>(std::min(kPartsPerThread * threads, total / kLeastOfPart));
    return Parallel(segments, batch, parts).Run();
  }
  const Borrowed borrowed;
  ScratchTable& table = *borrowed;
  table.Begin(total);
  std::int32_t* inverse = batch->inverse.data();
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const BadId bad = Add(segments[s], static_cast<std::int64_t>(s), &table, inverse);
    if (bad.segment >= 0) return bad;
    inverse += segments[s].count;
  }
  batch->unique.assign(table.keys().begin(), table.keys().end());
  return {};
}

}  // namespace tierstore
