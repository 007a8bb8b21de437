#include "kernels/divide.h"

#include <algorithm>
#include <stdexcept>

namespace tierstore {
namespace {

template <typename Id>
Divided Divide(const Bagged& batch, const std::int64_t* starts, std::int64_t shards) {
  const Id* ids = static_cast<const Id*>(batch.ids);
  Divided out;
  out.ids.resize(batch.count);
  out.positions.resize(batch.count);
  out.lengths.assign(shards * batch.bags, 0);
  std::vector<std::uint32_t> shard_of(batch.count);
  std::vector<std::int64_t> next(shards + 1, 0);
  std::int64_t at = 0;
  for (std::int64_t bag = 0; bag < batch.bags; ++bag) {
    const std::int64_t end = at + batch.lengths[bag];
    if (batch.lengths[bag] < 0 || end > batch.count)
      throw std::invalid_argument("lengths do not fit the ids");
    for (; at < end; ++at) {
      const auto shard = std::upper_bound(starts, starts + shards, std::int64_t{ids[at]}) - starts - 1;
      if (shard < 0) throw std::invalid_argument("an id is below all shards");
      shard_of[at] = static_cast<std::uint32_t>(shard);
      ++out.lengths[shard * batch.bags + bag];
      ++next[shard + 1];
    }
  }
  if (at != batch.count) throw std::invalid_argument("lengths do not fit the ids");
  for (std::int64_t shard = 0; shard < shards; ++shard) next[shard + 1] += next[shard];
  for (std::int64_t i = 0; i < batch.count; ++i) {
    const std::int64_t to = next[shard_of[i]]++;
    out.ids[to] = ids[i];
    out.positions[to] = i;
  }
  return out;
}

}  // namespace

Divided DivideByRows(const Bagged& batch, const std::int64_t* starts, std::int64_t shards) {
  return batch.is_int32 ? Divide<std::int32_t>(batch, starts, shards)
                        : Divide<std::int64_t>(batch, starts, shards);
}

}  // namespace tierstore
