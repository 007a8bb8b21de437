// Divides rows among lanes by their ids, so that no lane ever has more than its part of a table's rows.
//
// The number of lanes is a power of two, at most 16. Ids are divided into blocks of as many ids as there are
// lanes, and every lane has one id of each block. So of a table's first n ids a lane has n / lanes at most,
// rounded up. A hash of the table and the block says which of the block's ids a lane has: ids with a common
// pattern, such as all multiples of 16, spread over the lanes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/key.h"

namespace tierstore {

// The ids of lane `lane` of 2^bits lanes. The lane numbers them by their blocks.
struct LaneIds {
  static constexpr std::size_t kMostLanes = 16;

  int bits = 0;
  std::uint64_t lane = 0;

  static std::uint64_t LaneOf(std::uint64_t key, int bits) {
    return (key ^ MixKey(key >> bits)) & ((std::uint64_t{1} << bits) - 1);
  }
  static LaneIds Of(std::size_t lane, std::size_t lanes) { return {std::countr_zero(lanes), lane}; }

  // Returns the lane's number of an id that it has.
  std::uint64_t NumberOf(std::uint64_t key) const { return KeyId(key) >> bits; }
  // Returns the key of the id that has this number.
  std::uint64_t KeyOf(std::uint32_t table, std::uint64_t number) const {
    const std::uint64_t first = MakeKey(table, number << bits);
    return first | (LaneOf(first, bits) ^ lane);
  }
};

}  // namespace tierstore
