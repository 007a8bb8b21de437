// Divides keys into parts. Threads of the pool then take a part each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "common/page_allocator.h"
#include "common/thread_pool.h"

namespace tierstore {

// Threads share the work on this many keys, and on more.
inline constexpr std::int64_t kParallelKeys = 1 << 14;

// The keys of each part, and their positions among all keys. The keys of a part are in the order of
// positions.
class DividedKeys {
 public:
  using PartNumber = std::uint16_t;

  DividedKeys() = default;
  // part_of(key) is less than `parts`, which is 2^16 at most. The result is the same for any number of
  // threads.
  template <typename PartOf>
  DividedKeys(const std::uint64_t* keys, std::int64_t n, std::size_t parts, const PartOf& part_of)
      : positions_(static_cast<std::size_t>(n)), keys_(static_cast<std::size_t>(n)), begin_(parts + 1) {
    PageVector<PartNumber> part(static_cast<std::size_t>(n));
    const std::int64_t blocks = n < kParallelKeys ? 1 : NumThreads();
    const std::int64_t length = std::max<std::int64_t>(1, (n + blocks - 1) / blocks);
    // Of each block and part, the number of keys, and then where the next one goes.
    std::vector<std::vector<std::size_t>> next(static_cast<std::size_t>(blocks),
                                               std::vector<std::size_t>(parts));
    // A thread counts in memory of its own: counts of several threads in one cache line would be as slow as
    // memory that all of them change.
    ParallelFor(0, n, length, [&](std::int64_t first, std::int64_t last) {
      std::vector<std::size_t> count(parts);
      for (std::int64_t i = first; i < last; ++i) {
        const auto number = static_cast<PartNumber>(part_of(keys[i]));
        part[static_cast<std::size_t>(i)] = number;
        ++count[number];
      }
      next[static_cast<std::size_t>(first / length)] = std::move(count);
    });
    std::size_t at = 0;
    for (std::size_t number = 0; number < parts; ++number) {
      begin_[number] = at;
      for (std::vector<std::size_t>& of_block : next) {
        const std::size_t count = of_block[number];
        of_block[number] = at;
        at += count;
      }
    }
    begin_[parts] = at;
    ParallelFor(0, n, length, [&](std::int64_t first, std::int64_t last) {
      std::vector<std::size_t> to = next[static_cast<std::size_t>(first / length)];
      for (std::int64_t i = first; i < last; ++i) {
        const std::size_t place = to[part[static_cast<std::size_t>(i)]]++;
        positions_[place] = static_cast<std::int32_t>(i);
        keys_[place] = keys[i];
      }
    });
  }

  // Makes each position p positions[p]: those of the keys among others.
  void MapPositions(const std::int32_t* positions) {
    for (std::int32_t& position : positions_) position = positions[position];
  }

  std::int64_t total() const { return static_cast<std::int64_t>(keys_.size()); }
  std::int64_t size(std::size_t part) const { return static_cast<std::int64_t>(keys(part).size()); }
  std::span<const std::uint64_t> keys(std::size_t part) const {
    return {keys_.data() + begin_[part], begin_[part + 1] - begin_[part]};
  }
  // Returns how many keys are in the parts before this one.
  std::size_t begin(std::size_t part) const { return begin_[part]; }
  std::span<const std::int32_t> positions(std::size_t part) const {
    return {positions_.data() + begin_[part], begin_[part + 1] - begin_[part]};
  }

 private:
  PageVector<std::int32_t> positions_;
  PageVector<std::uint64_t> keys_;
  std::vector<std::size_t> begin_;  // of each part, and the end of the last one
};

}  // namespace tierstore
