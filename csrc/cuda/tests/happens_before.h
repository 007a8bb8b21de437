// Who touched which bytes last, by vector clocks: two accesses of which one writes must be ordered by
// streams, events and waits of the host.
//
// The host counts as one, whichever thread calls.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tierstore::cuda::fake {

constexpr std::size_t kMostActors = 12;  // the host, and streams
constexpr std::size_t kHost = 0;
using Clock = std::array<std::uint32_t, kMostActors>;

inline void Join(Clock* clock, const Clock& other) {
  for (std::size_t i = 0; i < kMostActors; ++i) (*clock)[i] = std::max((*clock)[i], other[i]);
}

// One who touches memory, at a time of its clock.
struct Actor {
  std::size_t number;
  Clock clock;
  std::string what;
};

inline std::string NameOf(std::size_t actor) {
  return actor == kHost ? "the host" : "stream " + std::to_string(actor);
}

// The last accesses to kUnit bytes.
struct Touched {
  static constexpr std::uintptr_t kUnit = 16;
  std::uint32_t written = 0;
  std::uint32_t writer = 0;
  Clock read{};

  // Returns the actor whose access is not ordered before this one; -1 if there is none.
  int Touch(const Actor& by, bool write) {
    int other = written > by.clock[writer] ? static_cast<int>(writer) : -1;
    for (std::size_t i = 0; write && i < kMostActors; ++i)
      if (read[i] > by.clock[i]) other = static_cast<int>(i);
    if (write) {
      written = by.clock[by.number], writer = static_cast<std::uint32_t>(by.number), read = {};
    } else {
      read[by.number] = by.clock[by.number];
    }
    return other;
  }
};

// Memory that streams may access.
struct Region {
  std::uintptr_t begin, end;
  std::string name;
  std::vector<Touched> touched;
};

class Memory {
 public:
  void Add(std::uintptr_t begin, std::size_t bytes, std::string name) {
    const std::size_t units = (bytes + Touched::kUnit - 1) / Touched::kUnit + 1;
    regions_[begin] = {begin, begin + bytes, std::move(name), std::vector<Touched>(units)};
    ++version_;
  }
  void Remove(std::uintptr_t begin) {
    regions_.erase(begin);
    ++version_;
  }
  // The region that has all of these bytes, or null.
  Region* Find(std::uintptr_t begin, std::size_t bytes) {
    auto after = regions_.upper_bound(begin);
    if (after == regions_.begin()) return nullptr;
    Region& region = std::prev(after)->second;
    return begin + bytes <= region.end ? &region : nullptr;
  }
  // Returns what is not in order, or nothing.
  std::string Touch(Region* region, std::uintptr_t begin, std::size_t bytes, const Actor& by, bool write) {
    const std::uintptr_t first = region->begin / Touched::kUnit;
    std::string wrong;
    for (std::uintptr_t unit = begin / Touched::kUnit; unit * Touched::kUnit < begin + bytes; ++unit) {
      const int other = region->touched[unit - first].Touch(by, write);
      if (other < 0 || !wrong.empty()) continue;
      const std::uintptr_t at = std::max(unit * Touched::kUnit, begin) - region->begin;
      wrong = by.what + " by " + NameOf(by.number) + (write ? " writes " : " reads ") + region->name +
              " at byte " + std::to_string(at) + ", not ordered after " +
              NameOf(static_cast<std::size_t>(other));
    }
    return wrong;
  }

  const std::map<std::uintptr_t, Region>& regions() const { return regions_; }
  std::uint64_t version() const { return version_; }

 private:
  std::map<std::uintptr_t, Region> regions_;
  std::uint64_t version_ = 0;
};

}  // namespace tierstore::cuda::fake
