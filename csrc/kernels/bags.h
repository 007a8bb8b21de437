// Describes bags of positions, grouped by feature, and where the pooled vector of each bag (or the gradient
// of the vector) lies.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tierstore {

enum class Pooling : std::uint8_t { kSum = 0, kMean = 1, kMax = 2 };

// Bag j holds positions offsets[j] .. offsets[j + 1]; feature f has bags bag_start[f] .. bag_start[f + 1],
// and the pooled vector of bag j lies out_offset[f] + (j - bag_start[f]) * out_stride[f] floats from the
// output's address.
struct Bags {
  const std::int64_t* offsets;
  std::int64_t num_bags;
  const std::int64_t* bag_start;
  std::int64_t num_features;
  const std::int64_t* out_offset;
  const std::int64_t* out_stride;
  const Pooling* poolings;

  std::int64_t num_positions() const { return offsets[num_bags]; }
  // Throws std::invalid_argument unless offsets and bag_start start at 0, do not decrease and agree in their
  // ends.
  void Check() const;
};

// Walks the features of consecutive bags.
class FeatureCursor {
 public:
  FeatureCursor(const Bags& bags, std::int64_t first_bag)
      : bags_(bags),
        feature_(std::upper_bound(bags.bag_start, bags.bag_start + bags.num_features + 1, first_bag) -
                 bags.bag_start - 1) {}

  // Bags must be asked for in ascending order.
  void MoveTo(std::int64_t bag) {
    while (bag >= bags_.bag_start[feature_ + 1]) ++feature_;
  }
  Pooling pooling() const { return bags_.poolings[feature_]; }
  std::int64_t OutputOf(std::int64_t bag) const {
    return bags_.out_offset[feature_] + (bag - bags_.bag_start[feature_]) * bags_.out_stride[feature_];
  }

 private:
  const Bags& bags_;
  std::int64_t feature_;
};

// Returns the number of positions of a bag that are not skipped.
inline std::int64_t CountUsed(const std::int32_t* inverse, std::int64_t begin, std::int64_t end) {
  std::int64_t used = 0;
  for (std::int64_t p = begin; p < end; ++p) used += inverse[p] >= 0;
  return used;
}

// Returns the number of bags in a piece of a parallel loop, so that a piece has about `positions` positions.
inline std::int64_t BagGrain(const Bags& bags, std::int64_t positions) {
  const std::int64_t n = std::max<std::int64_t>(1, bags.num_positions());
  return std::clamp<std::int64_t>(positions * bags.num_bags / n, 1, positions);
}

// Throws std::invalid_argument if an entry of inverse is >= num_unique.
void CheckInverse(const std::int32_t* inverse, std::int64_t n, std::int64_t num_unique);

}  // namespace tierstore
