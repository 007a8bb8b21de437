#include "cache/batch.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>

#include "common/key.h"

namespace tierstore {
namespace {

constexpr std::int64_t kBlock = 32;

// Open addressing over the batch's own unique keys: an entry is (generation, index), so the table is cleared
// by counting up and its memory is kept from batch to batch.
class ScratchTable {
 public:
  void Begin(std::int64_t keys) {
    const std::size_t wanted = std::bit_ceil(static_cast<std::size_t>(std::max<std::int64_t>(keys, 64)) * 2);
    if (wanted > entries_.size() || wanted * 16 < entries_.size()) {
      entries_.assign(wanted, 0);
      generation_ = 0;
    }
    if (++generation_ == 0) {
      std::fill(entries_.begin(), entries_.end(), 0);
      generation_ = 1;
    }
    mask_ = entries_.size() - 1;
    keys_.clear();
  }
  void Prefetch(std::uint64_t hash) const { __builtin_prefetch(&entries_[hash & mask_], 1); }

  std::int32_t FindOrAdd(std::uint64_t key, std::uint64_t hash) {
    std::size_t at = hash & mask_;
    while (true) {
      std::uint64_t& entry = entries_[at];
      if (static_cast<std::uint32_t>(entry >> 32) != generation_) {
        const auto index = static_cast<std::uint32_t>(keys_.size());
        entry = std::uint64_t{generation_} << 32 | index;
        keys_.push_back(key);
        return static_cast<std::int32_t>(index);
      }
      const auto index = static_cast<std::uint32_t>(entry);
      if (keys_[index] == key) return static_cast<std::int32_t>(index);
      at = (at + 1) & mask_;
    }
  }
  const std::vector<std::uint64_t>& keys() const { return keys_; }

 private:
  std::vector<std::uint64_t> keys_;  // unique, in order of first occurrence
  std::vector<std::uint64_t> entries_;
  std::size_t mask_ = 0;
  std::uint32_t generation_ = 0;
};

template <typename Id>
BadId AddSegment(const IdSegment& segment, std::int64_t number, ScratchTable* table, Batch* batch) {
  const Id* ids = static_cast<const Id*>(segment.ids);
  const auto bound = static_cast<std::uint64_t>(segment.bound);
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
      batch->inverse.push_back(skip ? -1 : table->FindOrAdd(keys[i], hashes[i]));
    }
  }
  return {};
}

}  // namespace

BadId Deduplicate(const std::vector<IdSegment>& segments, Batch* batch) {
  std::int64_t total = 0;
  for (const IdSegment& segment : segments) total += segment.count;
  if (total > std::numeric_limits<std::int32_t>::max()) {
    throw std::length_error("a lookup may have at most 2^31 - 1 ids");
  }
  static thread_local ScratchTable table;
  table.Begin(total);
  batch->unique.clear();
  batch->inverse.clear();
  batch->inverse.reserve(static_cast<std::size_t>(total));
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto number = static_cast<std::int64_t>(s);
    const BadId bad = segments[s].is_int32 ? AddSegment<std::int32_t>(segments[s], number, &table, batch)
                                           : AddSegment<std::int64_t>(segments[s], number, &table, batch);
    if (bad.segment >= 0) return bad;
  }
  batch->unique.assign(table.keys().begin(), table.keys().end());
  return {};
}

}  // namespace tierstore
