// Fetches memory that no core has used yet, a few rows before it is used.
#pragma once

#include <cstddef>

namespace tierstore {

inline constexpr std::size_t kPrefetch = 6;  // rows ahead

template <bool kWrite>
void Prefetch(const std::byte* begin, std::size_t size) {
  constexpr std::size_t kCacheLine = 64;
  for (std::size_t at = 0; at < size; at += kCacheLine) __builtin_prefetch(begin + at, kWrite);
}

}  // namespace tierstore
