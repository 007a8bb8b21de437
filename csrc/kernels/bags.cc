#include "kernels/bags.h"

#include <stdexcept>

namespace tierstore {
namespace {

bool Ascends(const std::int64_t* values, std::int64_t n) {
  bool ascends = true;
  for (std::int64_t i = 0; i < n; ++i) ascends &= values[i] <= values[i + 1];
  return ascends;
}

}  // namespace

void Bags::Check() const {
  if (offsets[0] != 0) throw std::invalid_argument("offsets must start at 0");
  if (bag_start[0] != 0 || bag_start[num_features] != num_bags) {
    throw std::invalid_argument("bag_start must run from 0 to the number of bags");
  }
  if (!Ascends(offsets, num_bags)) throw std::invalid_argument("offsets must not decrease");
  if (!Ascends(bag_start, num_features)) throw std::invalid_argument("bag_start must not decrease");
  for (std::int64_t f = 0; f < num_features; ++f) {
    if (poolings[f] > Pooling::kMax)
      throw std::invalid_argument("modes must be 0 (sum), 1 (mean) or 2 (max)");
  }
}

void CheckInverse(const std::int32_t* inverse, std::int64_t n, std::int64_t num_unique) {
  std::int32_t largest = -1;
  for (std::int64_t p = 0; p < n; ++p) largest = std::max(largest, inverse[p]);
  if (largest >= num_unique)
    throw std::invalid_argument("inverse has an entry that is not below the number of slots");
}

}  // namespace tierstore
