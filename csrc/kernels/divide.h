// The ids of a batch divided among the shards of a table that is cut by rows.
#pragma once

#include <cstdint>
#include <vector>

namespace tierstore {

// Shards hold consecutive ids: shard s those from starts[s] to starts[s + 1]; the first starts at or below
// every id. Bags are consecutive ids, lengths[b] of them.
struct Bagged {
  const void* ids;
  bool is_int32;
  std::int64_t count;
  const std::int64_t* lengths;
  std::int64_t bags;
};

struct Divided {
  std::vector<std::int64_t> ids;        // (count): by shard, in their order
  std::vector<std::int64_t> positions;  // (count): of each in the batch
  std::vector<std::int64_t> lengths;    // (shards, bags)
};

// Throws std::invalid_argument if lengths do not add up to count, or an id is below all shards.
Divided DivideByRows(const Bagged& batch, const std::int64_t* starts, std::int64_t shards);

}  // namespace tierstore
