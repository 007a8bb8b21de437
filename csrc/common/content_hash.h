// A hash of memory's content that detects changes at the speed of a cache. It does not resist adversaries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

// XXH64 with seed 0.
std::uint64_t ContentHash(const void* data, std::size_t size);

}  // namespace tierstore
