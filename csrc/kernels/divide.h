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

// Position of the first id outside [0, bound); -1: there is none.
std::int64_t FirstOutside(const IdsOf& ids, std::int64_t bound);

// Shards hold consecutive ids: shard s holds ids from starts[s] to starts[s + 1]; the first starts at or
// below every id. Bags are consecutive ids, lengths[b] of them.
struct Bagged {
  IdsOf ids;
  const std::int64_t* lengths;
  std::int64_t bags;
};

// `Wire`: the type of the sent ids, int32 if the tables' ids fit it.
template <typename Wire>
struct Divided {
  std::vector<Wire> ids;                // (count): by shard, in their order
  std::vector<std::int64_t> positions;  // (count): of each in the batch
  std::vector<Wire> lengths;            // (shards, bags)
  std::vector<std::int64_t> ends;       // (shards): of each one's ids and positions
};

// Throws std::invalid_argument if lengths do not add up to count, or an id is below all shards.
template <typename Wire>
Divided<Wire> DivideByRows(const Bagged& batch, const std::int64_t* starts, std::int64_t shards);

}  // namespace tierstore
