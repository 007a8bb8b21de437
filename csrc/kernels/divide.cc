#include "kernels/divide.h"

#include <stdexcept>

namespace tierstore {
namespace {

template <typename Id>
std::int64_t Outside(const Id* ids, std::int64_t count, std::int64_t bound) {
  const auto is_outside = [&](std::int64_t i) {
    return static_cast<std::uint64_t>(std::int64_t{ids[i]}) >= static_cast<std::uint64_t>(bound);
  };
  bool any = false;
  for (std::int64_t i = 0; i < count; ++i) any |= is_outside(i);
  for (std::int64_t i = 0; any && i < count; ++i) {
    if (is_outside(i)) return i;
  }
  return -1;
}

// Returns the last shard that starts at or below the id. The search has no branches, since the processor
// would mispredict half of them for random ids.
inline std::int64_t ShardOf(std::int64_t id, const std::int64_t* starts, std::int64_t shards) {
  const std::int64_t* first = starts;
  while (shards > 1) {
    const std::int64_t half = shards / 2;
    first += first[half] <= id ? half : 0;
    shards -= half;
  }
  return first - starts;
}

template <typename Id, typename Wire>
Divided<Wire> Divide(const Bagged& batch, const std::int64_t* starts, std::int64_t shards) {
  const Id* ids = static_cast<const Id*>(batch.ids.ids);
  const std::int64_t count = batch.ids.count;
  Divided<Wire> out;
  out.ids.resize(count);
  out.positions.resize(count);
  out.lengths.assign(shards * batch.bags, 0);
  std::vector<std::uint32_t> shard_of(count);
  std::vector<std::int64_t> next(shards + 1, 0);
  std::int64_t at = 0;
  bool below = false;
  for (std::int64_t bag = 0; bag < batch.bags; ++bag) {
    const std::int64_t end = at + batch.lengths[bag];
    if (batch.lengths[bag] < 0 || end > count) throw std::invalid_argument("lengths do not fit the ids");
    for (; at < end; ++at) {
      const std::int64_t shard = ShardOf(ids[at], starts, shards);
      below |= ids[at] < starts[0];
      shard_of[at] = static_cast<std::uint32_t>(shard);
      ++out.lengths[shard * batch.bags + bag];
      ++next[shard + 1];
    }
  }
  if (below) throw std::invalid_argument("an id is below all shards");
  if (at != count) throw std::invalid_argument("lengths do not fit the ids");
  for (std::int64_t shard = 0; shard < shards; ++shard) next[shard + 1] += next[shard];
  out.ends.assign(next.begin() + 1, next.end());
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t to = next[shard_of[i]]++;
    out.ids[to] = static_cast<Wire>(ids[i]);
    out.positions[to] = i;
  }
  return out;
}

}  // namespace

std::int64_t FirstOutside(const IdsOf& ids, std::int64_t bound) {
  return ids.is_int32 ? Outside(static_cast<const std::int32_t*>(ids.ids), ids.count, bound)
                      : Outside(static_cast<const std::int64_t*>(ids.ids), ids.count, bound);
}

template <typename Wire>
Divided<Wire> DivideByRows(const Bagged& batch, const std::int64_t* starts, std::int64_t shards) {
  return batch.ids.is_int32 ? Divide<std::int32_t, Wire>(batch, starts, shards)
                            : Divide<std::int64_t, Wire>(batch, starts, shards);
}

template Divided<std::int32_t> DivideByRows(const Bagged&, const std::int64_t*, std::int64_t);
template Divided<std::int64_t> DivideByRows(const Bagged&, const std::int64_t*, std::int64_t);

}  // namespace tierstore
