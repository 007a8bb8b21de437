// Backward kernels: per unique row, the sum of its gradients and one fused optimizer step.
//
// The gradients of a row are added in ascending order of position, in pieces of kReducePositions that are
// each summed from zero and then added in order. The pieces, and so the bits, are the same for every thread
// count.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/bags.h"
#include "kernels/optimizer.h"
#include "kernels/rows.h"

namespace tierstore {

inline constexpr std::int64_t kReducePositions = 256;

// How weights of 16 bits are rounded when a step has computed them in float32: to the nearest value (ties to
// even) where keys is null, else up with the probability of the part that is cut off, to 16 bits. The random
// bits are a pure function of the table's seed, the id, the column and the number of the step: halves of the
// words of Philox4x32-10 with the table's seed as its key and the counter (id mod 2^32, id >> 32, column
// div 8, number * 2 mod 2^32). (Counters of initial values end in 0, those of encoded rows are odd.) Finite
// values stay finite: beyond the largest number of the type they become that number.
struct UpdateRounding {
  const std::uint64_t* keys = nullptr;    // of the unique rows
  const std::uint64_t* seeds = nullptr;   // by table (key >> 48)
  const std::int64_t* columns = nullptr;  // by table, the first column in a wider table; null: 0
};

// The rows of a batch and, by CountPositions and PlacePositions (cache/csr.h), the positions that use them.
// slots must not repeat where rows are updated.
struct Touched {
  Rows rows;
  std::int64_t dim;
  const std::int32_t* slots;
  std::int64_t num_slots;
  const std::int32_t* csr_start;
  const std::int32_t* csr_positions;
  UpdateRounding rounding;
};

// Gradient of position p: its bag's gradient (laid out as the forward's output), times weights[p] unless
// weights is null, over the bag's count of positions for a mean; for max, only the columns whose argmax is p.
struct PooledGrads {
  Bags bags;
  const float* weights;
  const std::int32_t* argmax;
  const float* grad;
};

// RowWiseAdagrad and PartialRowWiseAdam of rows that are cut by columns need the squares of all their
// columns; by unique row. Gradients of such rows are not clipped by norm.
struct RowSquares {
  // If set, no row is read or updated: only the sum of the squares of the gradient over these columns goes
  // here (NaN if the gradient is not finite).
  float* out = nullptr;
  // The mean square over all columns. NaN means that the gradient of other columns is not finite, and counts
  // as if these columns' gradient were not finite. Null: the rows are whole.
  const float* means = nullptr;
};

// Both functions return the unique rows, ascending, whose gradient is not finite. With check_finite these
// rows are left as they were; without it no gradient is checked and no row returned.
std::vector<std::int32_t> UpdatePooled(const Touched& touched, const PooledGrads& grads,
                                       const OptimizerStep& step, bool check_finite, RowSquares squares = {});
// The gradient of position p is grad[p * stride ...].
std::vector<std::int32_t> UpdateRows(const Touched& touched, std::int64_t num_positions, const float* grad,
                                     std::int64_t stride, const OptimizerStep& step, bool check_finite,
                                     RowSquares squares = {});

}  // namespace tierstore
