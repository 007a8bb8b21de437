// Counts the rows that a plan has looked for in lower tiers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/page_allocator.h"

namespace tierstore {

// What a tier was asked for and what it had: rows, and the positions that use these rows.
struct TierCounts {
  std::int64_t rows = 0, hits = 0, uses = 0, hit_uses = 0;
  std::vector<std::int64_t> table_rows, table_hits;
};

// Returns how many positions use these rows. starts[row] says where those of a row begin.
std::int64_t UsesOf(const PageVector<std::int32_t>& rows, const std::int32_t* starts);

// Counts the rows that no tier above had: each tier, in order, is asked for those that are left, and `here`
// has a flag for each of these. `keys` has the key of each row, of one of `tables` tables.
std::vector<TierCounts> CountTiers(const PageVector<std::int32_t>& rows, const std::uint64_t* keys,
                                   const std::int32_t* starts, const std::vector<const bool*>& here,
                                   std::size_t tables);

}  // namespace tierstore
