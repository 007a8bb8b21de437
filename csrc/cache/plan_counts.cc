#include "cache/plan_counts.h"

#include "common/key.h"

namespace tierstore {

std::int64_t UsesOf(const PageVector<std::int32_t>& rows, const std::int32_t* starts) {
  std::int64_t uses = 0;
  for (const std::int32_t row : rows) uses += starts[row + 1] - starts[row];
  return uses;
}

std::vector<TierCounts> CountTiers(const PageVector<std::int32_t>& rows, const std::uint64_t* keys,
                                   const std::int32_t* starts, const std::vector<const bool*>& here,
                                   std::size_t tables) {
  std::vector<TierCounts> counts(here.size());
  for (TierCounts& of : counts) {
    of.table_rows.resize(tables);
    of.table_hits.resize(tables);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t uses = starts[rows[i] + 1] - starts[rows[i]];
    const std::size_t table = KeyTable(keys[i]);
    for (std::size_t tier = 0; tier < here.size(); ++tier) {
      TierCounts& of = counts[tier];
      const bool is_here = here[tier][of.rows++];
      of.uses += uses;
      ++of.table_rows.at(table);
      if (!is_here) continue;
      ++of.hits;
      of.hit_uses += uses;
      ++of.table_hits.at(table);
      break;
    }
  }
  return counts;
}

}  // namespace tierstore
