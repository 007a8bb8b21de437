#include "cache/lane_map.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <utility>

#include "cache/lane_ids.h"
#include "common/key.h"

namespace tierstore {
namespace {
constexpr std::size_t kMostLanes = std::size_t{std::numeric_limits<DividedKeys::PartNumber>::max()} + 1;
}  // namespace

LaneMap::LaneMap(const std::vector<std::int64_t>& slots, std::vector<LaneRange> lanes_of, bool by_id)
    : slots_(slots), lanes_of_(std::move(lanes_of)), by_id_(by_id) {
  if (slots_.empty() || slots_.size() > kMostLanes)
    throw std::invalid_argument("a tier must have between 1 and 65,536 lanes");
  for (const std::int64_t own : slots_) {
    begin_.push_back(capacity_);
    capacity_ += own;
  }
  for (const LaneRange& lanes : lanes_of_) {
    if (lanes.count == 0 || lanes.first + lanes.count > slots_.size())
      throw std::invalid_argument("a table's lanes do not exist");
  }
  if (!by_id_) return;
  bits_ = std::countr_zero(lanes());
  if (lanes() > LaneIds::kMostLanes || !std::has_single_bit(lanes()) ||
      std::any_of(slots_.begin(), slots_.end(), [&](std::int64_t own) { return own != slots_[0]; }))
    throw std::invalid_argument("lanes by id must be 1, 2, 4, 8 or 16, with equally many slots");
}

LaneMap::Place LaneMap::PlaceOf(std::int32_t slot) const {
  if (by_id_) return {static_cast<std::size_t>(slot) & (lanes() - 1), slot >> bits_};
  if (slot < capacity_) {
    const auto lane =
        static_cast<std::size_t>(std::upper_bound(begin_.begin(), begin_.end(), slot) - begin_.begin()) - 1;
    return {lane, static_cast<std::int32_t>(slot - begin_[lane])};
  }
  const auto overflow = static_cast<std::size_t>(slot - capacity_);
  const std::size_t lane = overflow % lanes();
  return {lane, static_cast<std::int32_t>(slots_[lane] + static_cast<std::int64_t>(overflow / lanes()))};
}

void LaneMap::ToTier(std::size_t lane, PageVector<std::int32_t>* slots) const {
  for (std::int32_t& slot : *slots) slot = SlotOf(lane, slot);
}

DividedKeys LaneMap::Divide(const std::uint64_t* keys, std::int64_t n) const {
  return {keys, n, lanes(), [this](std::uint64_t key) { return LaneOf(key); }};
}

std::vector<PageVector<std::int32_t>> LaneMap::DivideSlots(const std::int32_t* slots, std::int64_t n) const {
  const std::int64_t blocks = n < kParallelKeys ? 1 : NumThreads();
  const std::int64_t length = std::max<std::int64_t>(1, (n + blocks - 1) / blocks);
  // Of each block and lane, the number of slots, and then where the next one goes.
  std::vector<std::vector<std::size_t>> next(static_cast<std::size_t>(blocks),
                                             std::vector<std::size_t>(lanes()));
  ParallelFor(0, n, length, [&](std::int64_t first, std::int64_t last) {
    std::vector<std::size_t> count(lanes());  // in memory that no other thread changes
    for (std::int64_t i = first; i < last; ++i) ++count[PlaceOf(slots[i]).lane];
    next[static_cast<std::size_t>(first / length)] = std::move(count);
  });
  std::vector<PageVector<std::int32_t>> divided(lanes());
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    std::size_t at = 0;
    for (std::vector<std::size_t>& of_block : next) at += std::exchange(of_block[lane], at);
    divided[lane].resize(at);
  }
  ParallelFor(0, n, length, [&](std::int64_t first, std::int64_t last) {
    std::vector<std::size_t> to = next[static_cast<std::size_t>(first / length)];
    for (std::int64_t i = first; i < last; ++i) {
      const Place place = PlaceOf(slots[i]);
      divided[place.lane][to[place.lane]++] = place.slot;
    }
  });
  return divided;
}

}  // namespace tierstore
