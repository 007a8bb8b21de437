#include "cache/csr.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/thread_pool.h"

namespace tierstore {

namespace {

// Threads share the work of so many positions. Each passes over all of them for rows of its own.
constexpr std::int64_t kParallelFrom = 1 << 16;

// Calls work(first, last) for ranges of unique rows, together [0, num_unique).
template <typename Work>
void ForRows(std::int64_t n, std::int64_t num_unique, const Work& work) {
  const std::int64_t threads = n < kParallelFrom ? 1 : NumThreads();
  const std::int64_t grain = std::max<std::int64_t>(1, (num_unique + threads - 1) / threads);
  ParallelFor(0, num_unique, grain, work);
}

}  // namespace

void CountPositions(const std::int32_t* inverse, std::int64_t n, std::int64_t num_unique,
                    std::int32_t* start) {
  if (std::any_of(inverse, inverse + n, [&](std::int32_t row) { return row >= num_unique; }))
    throw std::invalid_argument("inverse has an entry >= num_unique");
  std::fill(start, start + num_unique + 1, 0);
  ForRows(n, num_unique, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t p = 0; p < n; ++p) {
      if (inverse[p] >= first && inverse[p] < last) ++start[inverse[p] + 1];
    }
  });
  for (std::int64_t u = 0; u < num_unique; ++u) start[u + 1] += start[u];
}

void PlacePositions(const std::int32_t* inverse, std::int64_t n, std::int64_t num_unique, std::int32_t* start,
                    std::int32_t* positions) {
  ForRows(n, num_unique, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t p = 0; p < n; ++p) {
      if (inverse[p] >= first && inverse[p] < last)
        positions[start[inverse[p]]++] = static_cast<std::int32_t>(p);
    }
  });
  // Every start has become the next one's: shift them back.
  std::memmove(start + 1, start, num_unique * sizeof(*start));
  start[0] = 0;
}

}  // namespace tierstore
