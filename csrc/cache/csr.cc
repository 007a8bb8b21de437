#include "cache/csr.h"

#include <cstring>
#include <stdexcept>

#include "common/thread_pool.h"

namespace tierstore {

namespace {

// Calls work(begin, end) for ranges of positions, in their order within a part.
template <typename Work>
void ForPositions(std::int64_t n, const PositionParts& parts, const Work& work) {
  if (parts.empty()) return work(0, n);
  ParallelFor(0, static_cast<std::int64_t>(parts.size()), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t part = first; part < last; ++part) {
      for (const PositionRange& range : parts[static_cast<std::size_t>(part)]) work(range.begin, range.end);
    }
  });
}

}  // namespace

void CountPositions(std::span<const std::int32_t> inverse, const PositionParts& parts,
                    std::int64_t num_unique, std::int32_t* start) {
  std::memset(start, 0, static_cast<std::size_t>(num_unique + 1) * sizeof(*start));
  ForPositions(static_cast<std::int64_t>(inverse.size()), parts, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      if (inverse[p] < 0) continue;
      if (inverse[p] >= num_unique)
        throw std::invalid_argument("inverse has an entry that is not below num_unique");
      ++start[inverse[p] + 1];
    }
  });
  for (std::int64_t u = 0; u < num_unique; ++u) start[u + 1] += start[u];
}

void PlacePositions(std::span<const std::int32_t> inverse, const PositionParts& parts,
                    std::int64_t num_unique, std::int32_t* start, std::int32_t* positions) {
  ForPositions(static_cast<std::int64_t>(inverse.size()), parts, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      if (inverse[p] >= 0) positions[start[inverse[p]]++] = static_cast<std::int32_t>(p);
    }
  });
  // Every start has become the start of the next row, so all starts are shifted back.
  std::memmove(start + 1, start, static_cast<std::size_t>(num_unique) * sizeof(*start));
  start[0] = 0;
}

LongRows FindLongRows(std::span<const std::int32_t> start, std::int32_t few, std::int32_t piece) {
  LongRows found;
  found.first_piece.push_back(0);
  for (std::size_t row = 0; row + 1 < start.size(); ++row) {
    const std::int32_t positions = start[row + 1] - start[row];
    if (positions <= few) continue;
    const auto number = static_cast<std::int32_t>(row);
    if (positions <= piece) {
      found.others.push_back(number);
      continue;
    }
    found.hot.push_back(number);
    found.first_piece.push_back(found.first_piece.back() + (positions - 1) / piece + 1);
  }
  return found;
}

}  // namespace tierstore
