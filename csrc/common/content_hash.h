// Hashes the content of memory, to detect changes at the speed of a cache. The hash does not resist
// adversaries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

// Returns XXH64 with seed 0.
std::uint64_t ContentHash(const void* data, std::size_t size);

}  // namespace tierstore
