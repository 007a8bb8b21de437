// Finds places in hash tables with open addressing and linear probing, whose sizes need not be powers of two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

// Returns where probing for a key begins. `hash` has 32 well-mixed bits; `size` is the number of places, less
// than 2^32.
inline std::size_t HomePlace(std::uint32_t hash, std::size_t size) {
  return std::uint64_t{hash} * size >> 32;
}
inline std::size_t NextPlace(std::size_t at, std::size_t size) { return at + 1 == size ? 0 : at + 1; }

}  // namespace tierstore
