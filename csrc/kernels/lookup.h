// Forward kernels look rows up by slot, pooled by bags or one vector per position.
//
// Position p reads row slots[inverse[p]]; inverse[p] < 0 skips position p (padding). Rows of a bag are added
// in the order of positions, starting from zero, so the result has the same bits for any slots, threads and
// instruction set. Rows may have weights of 16 bits; outputs, gradients and all arithmetic are float32.
#pragma once

#include <cstdint>

#include "kernels/bags.h"
#include "kernels/rows.h"

namespace tierstore {

// Gather is the input of a lookup; entries of `inverse` must be below num_slots.
struct Gather {
  Rows rows;
  std::int64_t dim;
  const std::int32_t* slots;
  std::int64_t num_slots;
  const std::int32_t* inverse;
};

// Writes the pooled vector of every bag: the sum of weights[p] * row. A mean divides the sum by the number of
// positions that are not skipped. Weights may be null, which means that all weights are 1. For max, weights
// do not count, NaN is larger than any number, and of equal values the first wins; the position of the winner
// is written to argmax[bag * dim + column] unless argmax is null (-1 for an empty bag). Other modes do not
// write argmax. A bag without used positions gives zeros.
void LookupPooled(const Gather& gather, const Bags& bags, const float* weights, float* out,
                  std::int32_t* argmax);

// Writes the row of each of n positions to out[p * out_stride + column], and zeros for skipped positions.
void LookupRows(const Gather& gather, std::int64_t n, float* out, std::int64_t out_stride);

// Sets out[p] to the derivative of the pooled vectors by weights[p]: the dot product of the row of p and the
// gradient of p's bag, which is laid out as the forward's output. A mean divides by the bag's count of
// positions. For max, and for skipped positions, out[p] is 0.
void WeightGrads(const Gather& gather, const Bags& bags, const float* grad, float* out);

}  // namespace tierstore
