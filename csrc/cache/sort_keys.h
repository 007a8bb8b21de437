// The ids of a lookup as numbers that a GPU sorts (cuda/sort.cuh), which deduplicates them as cache/batch.h
// does.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/batch.h"

namespace tierstore {

// Writes bases[s] + id for every id of segment s, one segment after the other, and `skipped` for padding.
// Returns the first bad id, as Deduplicate does; the keys must not be used then. Threads of the pool share
// the ids. The sums must fit 32 bits.
BadId WriteSortKeys(const std::vector<IdSegment>& segments, const std::vector<std::uint32_t>& bases,
                    std::uint32_t skipped, std::uint32_t* keys);

}  // namespace tierstore
