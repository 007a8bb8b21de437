// Checks the ids of a batch before they are sent, and divides them among the shards of a table that is cut by
// rows.
#pragma once

#include <cstdint>
#include <vector>

namespace tierstore {

struct IdsOf {
  const void* ids;
  bool is_int32;
  std::int64_t count;
};

// Returns the position of the first id outside [0, bound), or -1.
std::int64_t FirstOutside(const IdsOf& ids, std::int64_t bound);

// Shards hold consecutive ids: shard s holds ids from starts[s] to starts[s + 1], and shard 0 starts at or
// below every id. Bag b is the next lengths[b] ids.
struct Bagged {
  IdsOf ids;
  const std::int64_t* lengths;
  std::int64_t bags;
};

// `Wire` is the type of the sent ids: int32 if the tables' ids fit into int32, else int64.
template <typename Wire>
struct Divided {
  std::vector<Wire> ids;                // (count): by shard, in the order of the batch
  std::vector<std::int64_t> positions;  // (count): of each id in the batch
  std::vector<Wire> lengths;            // (shards, bags)
  std::vector<std::int64_t> ends;       // (shards): of each shard's ids and positions
};

// Throws std::invalid_argument if lengths do not add up to count, or an id is below all shards.
template <typename Wire>
Divided<Wire> DivideByRows(const Bagged& batch, const std::int64_t* starts, std::int64_t shards);

}  // namespace tierstore
