// A hash of memory's content that tells changed from unchanged, at the speed of a cache. Not against
// adversaries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

// XXH64 with seed 0.
std::uint64_t ContentHash(const void* data, std::size_t size);

}  // namespace tierstore
