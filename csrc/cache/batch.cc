#include "cache/batch.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <utility>

#include "cache/probing.h"
#include "common/key.h"
#include "common/thread_pool.h"

namespace tierstore {
namespace {

constexpr std::int64_t kBlock = 32;
// Lookups of so many ids are deduplicated in parts: by one thread, by several; and the least ids of a part.
constexpr std::int64_t kPartsFrom = 1 << 16, kPartsOfThreadsFrom = 1 << 14, kLeastOfPart = 1 << 12;

// Numbers the keys of a part. A ScratchTable keeps its memory from part to part and from batch to batch, and
// clears it by counting a generation up. The memory of a large lookup goes back while small lookups follow.
class ScratchTable {
 public:
  struct ById {
    std::uint32_t generation = 0;
    std::uint32_t index = 0;
  };

  // Forgets all keys, before a part of a lookup. The arguments are the ids of the part and of the lookup.
  void Begin(std::int64_t part_ids, std::int64_t lookup_ids) {
    const auto ids = static_cast<std::size_t>(part_ids);
    GiveBack(std::max(static_cast<std::size_t>(lookup_ids), kSmallIds / 16) * 16);
    most_by_id_ = std::max(kSmallIds, ids * kPlacesPerId);
    used_by_id_ = 0;
    if (++part_ == 0) {
      for (PageVector<ById>* all : {&by_id_, &first_by_id_}) std::fill(all->begin(), all->end(), ById{});
      part_ = 1;
    }
    const std::size_t as_before = ids * hashed_ / std::max<std::size_t>(last_ids_, 1);
    keys_.clear();
    hashed_ = 0;
    last_ids_ = ids;
    Resize(std::max(ids / kIdsPerPlace, as_before + as_before / 2 + as_before / 16));
  }

  // Returns the entries by id of a table with few ids, or null where there is no room for them. The entries
  // do not move before the next call.
  ById* OfTable(const IdSegment& segment) {
    if (segment.table >= first_by_id_.size()) first_by_id_.resize(segment.table + 1);
    ById& first = first_by_id_[segment.table];
    if (first.generation != part_) {  // the first segment of the table
      const auto bound = static_cast<std::size_t>(segment.bound);
      const std::size_t most = std::max(kSmallBound, static_cast<std::size_t>(segment.count) * kPlacesPerId);
      const bool fits = bound <= most && used_by_id_ + bound <= most_by_id_;
      first = {part_, fits ? static_cast<std::uint32_t>(used_by_id_) : kHashed};
      if (fits) used_by_id_ += bound;
      if (used_by_id_ > by_id_.size()) by_id_.resize(used_by_id_);
    }
    return first.index == kHashed ? nullptr : by_id_.data() + first.index;
  }
  std::int32_t FindOrAdd(ById* entry, std::uint64_t key) {
    if (entry->generation != part_) {
      *entry = {part_, static_cast<std::uint32_t>(keys_.size())};
      keys_.push_back(key);
    }
    return static_cast<std::int32_t>(entry->index);
  }
  void Prefetch(std::uint64_t hash) const { __builtin_prefetch(&entries_[Home(hash)], 1); }

  std::int32_t FindOrAdd(std::uint64_t key, std::uint64_t hash) {
    for (std::size_t at = Home(hash);; at = NextPlace(at, size_)) {
      Entry& entry = entries_[at];
      if (entry.generation != generation_) {
        const auto index = static_cast<std::uint32_t>(keys_.size());
        entry = {key, generation_, index};
        keys_.push_back(key);
        if (++hashed_ * 3 > size_ * 2) Grow();
        return static_cast<std::int32_t>(index);
      }
      if (entry.key == key) return static_cast<std::int32_t>(entry.index);
    }
  }
  const std::vector<std::uint64_t>& keys() const { return keys_; }

 private:
  // The entries are a hash table with open addressing.
  struct Entry {
    std::uint64_t key = 0;
    std::uint32_t generation = 0;
    std::uint32_t index = 0;
  };
  // Gives back the memory that a large lookup needed, once many parts in turn have needed less than `much`.
  void GiveBack(std::size_t much) {
    const std::size_t most = std::max({by_id_.size(), entries_.size(), keys_.capacity()});
    idle_parts_ = most > much ? idle_parts_ + 1 : 0;
    if (idle_parts_ < kMostIdleParts) return;
    by_id_ = {};
    entries_ = {};
    keys_ = {};
  }
  std::size_t Home(std::uint64_t hash) const {
    return HomePlace(static_cast<std::uint32_t>(hash >> 32), size_);
  }

  // Makes `size` empty places. Most of the places should fit in a processor's cache.
  void Resize(std::size_t size) {
    size_ = std::max(size, kLeastPlaces);
    if (size_ > entries_.size()) {
      entries_ = PageVector<Entry>(size_ + size_ / 16, Entry{});
      generation_ = 0;
    }
    if (++generation_ == 0) {
      std::fill(entries_.begin(), entries_.end(), Entry{});
      generation_ = 1;
    }
  }
  void Grow() {
    PageVector<Entry> known;
    known.reserve(hashed_);
    for (std::size_t at = 0; at < size_; ++at) {
      if (entries_[at].generation == generation_) known.push_back(entries_[at]);
    }
    Resize(size_ * 2);
    for (const Entry& entry : known) {
      std::size_t at = Home(HashKey(entry.key));
      while (entries_[at].generation == generation_) at = NextPlace(at, size_);
      entries_[at] = {entry.key, generation_, entry.index};
    }
  }

  // Tables with at most this many rows have an entry per id. So have larger tables with at most kPlacesPerId
  // rows per id of the lookup: such entries take no more memory than a hash table would.
  static constexpr std::size_t kSmallBound = std::size_t{1} << 13;
  static constexpr std::size_t kPlacesPerId = 2;
  static constexpr std::size_t kSmallIds = std::size_t{1} << 19;  // 4 MiB
  static constexpr std::uint32_t kHashed = ~std::uint32_t{0};
  static constexpr std::uint32_t kMostIdleParts = 16;
  // As a rule most ids of a large lookup repeat. Where most ids of the last part did not repeat, there are as
  // many places as the same share of keys takes, since growing takes longer than finding the keys.
  static constexpr std::size_t kIdsPerPlace = 2;
  static constexpr std::size_t kLeastPlaces = 96;

  PageVector<ById> by_id_;
  std::size_t used_by_id_ = 0, most_by_id_ = 0;
  PageVector<ById> first_by_id_;  // of each table, where its entries begin; the generation is part_
  std::uint32_t part_ = 0;
  std::vector<std::uint64_t> keys_;  // unique, in order of first occurrence
  PageVector<Entry> entries_;        // of which the first size_ are in use
  std::size_t size_ = 0, hashed_ = 0;
  std::size_t last_ids_ = 0;  // of the last part
  std::uint32_t generation_ = 0, idle_parts_ = 0;
};

// Lends a ScratchTable, as large as the largest batch so far, to each thread that deduplicates now.
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
  ScratchTable::ById* const by_id = table->OfTable(segment);
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

// A part has the segments of some tables.
struct Part {
  struct Range {
    std::size_t segment;
    bool is_alone = false;            // whether no other segment has ids of its table
    std::int64_t begin = 0, end = 0;  // its first occurrences among the part's keys
  };
  std::int64_t count = 0, bound = 0;  // ids, and the rows of the table if it has one only
  std::vector<Range> ranges = {};
  BadId bad = {};
  PageVector<std::uint64_t> keys = {};
};

// Divides the segments by table: the table with most ids first, and of equally many ids those of the largest
// table, which has the most unique ones. Tables with few ids share a part.
std::vector<Part> Divide(const std::vector<IdSegment>& segments) {
  std::map<std::uint32_t, Part> tables;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    Part& table = tables[segments[s].table];
    table.count += segments[s].count;
    table.bound = segments[s].bound;
    table.ranges.push_back({s});
  }
  std::vector<Part> by_size;
  for (auto& [number, table] : tables) {
    for (Part::Range& range : table.ranges) range.is_alone = table.ranges.size() == 1;
    by_size.push_back(std::move(table));
  }
  std::ranges::stable_sort(by_size, std::greater(),
                           [](const Part& a) { return std::pair(a.count, a.bound); });
  std::vector<Part> parts;
  for (Part& table : by_size) {
    if (parts.empty() || parts.back().count >= kLeastOfPart) parts.emplace_back();
    Part& part = parts.back();
    part.count += table.count;
    part.ranges.insert(part.ranges.end(), table.ranges.begin(), table.ranges.end());
  }
  for (Part& part : parts) std::ranges::sort(part.ranges, {}, &Part::Range::segment);
  return parts;
}

// Deduplicates a large lookup part by part.
class ByParts {
 public:
  ByParts(const std::vector<IdSegment>& segments, Batch* batch)
      : segments_(segments), batch_(*batch), parts_(Divide(segments)), first_(segments.size()) {
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
    for (const Part& part : parts_) {
      std::vector<PositionRange>& ranges = batch_.parts.emplace_back();
      for (const Part::Range& range : part.ranges) {
        const std::int64_t begin = position_[range.segment];
        ranges.push_back({begin, begin + segments_[range.segment].count});
      }
    }
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
    table.Begin(part->count, static_cast<std::int64_t>(batch_.inverse.size()));
    for (Part::Range& range : part->ranges) {
      range.begin = static_cast<std::int64_t>(table.keys().size());
      part->bad = Add(segments_[range.segment], static_cast<std::int64_t>(range.segment), &table,
                      batch_.inverse.data() + position_[range.segment]);
      if (part->bad.segment >= 0) return;
      range.end = static_cast<std::int64_t>(table.keys().size());
    }
    part->keys.assign(table.keys().begin(), table.keys().end());
  }

  // Numbers the keys in the order of the segments that have them first.
  void NumberKeys() {
    for (const Part& part : parts_) {
      for (const Part::Range& range : part.ranges) first_[range.segment] = range.end - range.begin;
    }
    std::int64_t keys = 0;
    for (std::int64_t& first : first_) keys += std::exchange(first, keys);
    batch_.unique.resize(static_cast<std::size_t>(keys));
  }

  void Renumber(Part* part) {
    for (std::size_t r = 0; r < part->ranges.size(); ++r) {
      const Part::Range& range = part->ranges[r];
      std::copy(part->keys.begin() + range.begin, part->keys.begin() + range.end,
                batch_.unique.begin() + first_[range.segment]);
      std::int32_t* const inverse = batch_.inverse.data() + position_[range.segment];
      const std::int64_t count = segments_[range.segment].count;
      if (range.is_alone) {
        const std::int32_t shift = Shift(range);
        for (std::int64_t i = 0; i < count; ++i) inverse[i] += inverse[i] < 0 ? 0 : shift;
      } else {
        RenumberShared({part->ranges.data(), r + 1}, inverse, count);
      }
    }
  }

  std::int32_t Shift(const Part::Range& range) const {
    return static_cast<std::int32_t>(first_[range.segment] - range.begin);
  }

  // Renumbers positions of the last of `ranges`; an earlier range of the table may have had their keys first.
  void RenumberShared(std::span<const Part::Range> ranges, std::int32_t* inverse, std::int64_t count) const {
    const Part::Range& own = ranges.back();
    for (std::int64_t i = 0; i < count; ++i) {
      if (inverse[i] < 0) continue;
      if (inverse[i] >= own.begin) {
        inverse[i] += Shift(own);
        continue;
      }
      const auto after =
          std::upper_bound(ranges.begin(), ranges.end() - 1, inverse[i],
                           [](std::int32_t key, const Part::Range& earlier) { return key < earlier.begin; });
      inverse[i] += Shift(*std::prev(after));
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
  const std::int64_t parts_from = NumThreads() > 1 ? kPartsOfThreadsFrom : kPartsFrom;
  if (segments.size() > 1 && total >= parts_from) return ByParts(segments, batch).Run();
  const Borrowed borrowed;
  ScratchTable& table = *borrowed;
  table.Begin(total, total);
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
