// Scales the permuted id h of TableIndex, 48 bits, to positions of its array.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

inline constexpr std::uint64_t kMask48 = (std::uint64_t{1} << 48) - 1;

inline std::uint64_t Scale(std::uint64_t h, std::size_t capacity) {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(h) * capacity) >> 48);
}

// Returns a number that is not larger than any h whose home is the given number of steps from the first home,
// and hardly smaller.
inline std::uint64_t FirstHash(std::int64_t steps, std::uint64_t step) {
  if (steps <= 0) return 0;
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(steps) * step) >> 16);
}

}  // namespace tierstore
