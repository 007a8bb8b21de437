// Divides rows among lanes by their ids, so that no lane ever has more than its share of a table's rows.
//
// The lane of an id is the XOR of the id's digits of 4 bits, modulo the number of lanes: a power of two, at
// most 16. So of `lanes` consecutive ids from a multiple of `lanes` on, every lane has one, and a table's
// first n ids give a lane n / lanes rows, rounded up, at most. Ids with a common pattern, such as all
// multiples of 16, spread over the lanes, too.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace tierstore {

// The ids of one lane of 2^bits lanes, which are numbered in their order: number i is one of the 2^bits ids
// from i * 2^bits on.
struct LaneIds {
  static constexpr std::size_t kMostLanes = 16;

  int bits = 0;
  std::uint64_t lane = 0;

  static std::uint64_t LaneOf(std::uint64_t id, std::size_t lanes) {
    id ^= id >> 32;
    id ^= id >> 16;
    id ^= id >> 8;
    id ^= id >> 4;
    return id & (lanes - 1);
  }
  static LaneIds Of(std::size_t lane, std::size_t lanes) { return {std::countr_zero(lanes), lane}; }

  // Both take and return what they need for one of the lane's ids.
  std::uint64_t NumberOf(std::uint64_t id) const { return id >> bits; }
  std::uint64_t IdOf(std::uint64_t number) const {
    const std::uint64_t first = number << bits;
    return first | (LaneOf(first, std::size_t{1} << bits) ^ lane);
  }
};

}  // namespace tierstore
