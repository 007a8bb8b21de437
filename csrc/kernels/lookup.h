// Forward kernels: pooled and sequence lookups by slot.
//
// A position p reads row slots[inverse[p]]; inverse[p] < 0 skips it (padding). Rows of a bag are added in the
// order of positions, starting from zero, so the result has the same bits for any slots, threads and
// instruction set. Rows may have weights of 16 bits; outputs and gradients are float32, and so is all
// arithmetic.
#pragma once

#include <cstdint>

#include "kernels/bags.h"
#include "kernels/rows.h"

namespace tierstore {

// The input of a lookup; `inverse` entries must be below num_slots.
struct Gather {
  Rows rows;
  std::int64_t dim;
  const std::int32_t* slots;
  std::int64_t num_slots;
  const std::int32_t* inverse;
};

// Writes the pooled vector of every bag: the sum of weights[p] * row, divided by the count of positions not
// skipped for a mean; weights may be null (all 1). Max ignores weights, a NaN wins, and the first of equal
// values wins; its position is written to argmax[bag * dim + column] (-1 for an empty bag; other modes leave
// argmax alone) unless argmax is null. A bag without used positions gives zeros.
void LookupPooled(const Gather& gather, const Bags& bags, const float* weights, float* out,
                  std::int32_t* argmax);

// out[p * out_stride + column] for each of n positions; zeros where skipped.
void LookupRows(const Gather& gather, std::int64_t n, float* out, std::int64_t out_stride);

// out[p] = derivative of the pooled vectors by weights[p]: the dot product of the gradient of the bag of p
// (laid out as the forward's output) and the row of p, over the count for a mean; 0 for max and where
// skipped.
void WeightGrads(const Gather& gather, const Bags& bags, const float* grad, float* out);

}  // namespace tierstore
