#include "cache/csr.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace tierstore {

void CountPositions(const std::int32_t* inverse, std::int64_t n, std::int64_t num_unique,
                    std::int32_t* start) {
  std::fill(start, start + num_unique + 1, 0);
  for (std::int64_t p = 0; p < n; ++p) {
    if (inverse[p] < 0) continue;
    if (inverse[p] >= num_unique) throw std::invalid_argument("inverse has an entry >= num_unique");
    ++start[inverse[p] + 1];
  }
  for (std::int64_t u = 0; u < num_unique; ++u) start[u + 1] += start[u];
}

void PlacePositions(const std::int32_t* inverse, std::int64_t n, std::int64_t num_unique, std::int32_t* start,
                    std::int32_t* positions) {
  for (std::int64_t p = 0; p < n; ++p) {
    if (inverse[p] >= 0) positions[start[inverse[p]]++] = static_cast<std::int32_t>(p);
  }
  // Every start has become the next one's: shift them back.
  std::memmove(start + 1, start, num_unique * sizeof(*start));
  start[0] = 0;
}

}  // namespace tierstore
