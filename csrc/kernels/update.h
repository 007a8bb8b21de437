// Backward kernels sum the gradients of each unique row, and make one fused optimizer step with the sum.
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

// UpdateRounding says how weights of 16 bits are rounded when a step has computed the weights in float32: to
// the nearest value (ties to even) where keys is null, else up with the probability of the part that is cut
// off, to 16 bits. The random bits are a pure function of the table's seed, the id, the column and the number
// of the step: halves of the words of Philox4x32-10 with the table's seed as the key and the counter (id mod
// 2^32, id >> 32, column div 8, number * 2 mod 2^32). (The last words of initial values' counters are 0, and
// of encoded rows' counters odd.) Finite values stay finite: beyond the largest number of the type they
// become that number.
struct UpdateRounding {
  const std::uint64_t* keys = nullptr;    // of the unique rows
  const std::uint64_t* seeds = nullptr;   // by table (key >> 48)
  const std::int64_t* columns = nullptr;  // by table, the first column in a wider table; null: 0
};

// Touched has the rows of a batch and, by CountPositions and PlacePositions (cache/csr.h), the positions that
// use each row. slots must not repeat where rows are updated.
struct Touched {
  Rows rows;
  std::int64_t dim;
  const std::int32_t* slots;
  std::int64_t num_slots;
  const std::int32_t* csr_start;
  const std::int32_t* csr_positions;
  UpdateRounding rounding;
};

// The gradient of position p is the gradient of p's bag (laid out as the forward's output), times weights[p]
// unless weights is null. A mean divides by the bag's count of positions. For max, the position gets only the
// columns whose argmax is p.
struct PooledGrads {
  Bags bags;
  const float* weights;
  const std::int32_t* argmax;
  const float* grad;
};

// Where rows are cut by columns, RowWiseAdagrad and PartialRowWiseAdam need the squares of all columns of a
// row. RowSquares has them by unique row. Gradients of such rows are not clipped by norm.
struct RowSquares {
  // If `out` is set, no row is read or updated: `out` gets the sum of the squares of the gradient over these
  // columns (NaN if the gradient is not finite).
  float* out = nullptr;
  // `means` has the mean square over all columns. NaN means that the gradient of other columns is not finite,
  // and counts as if these columns' gradient were not finite. Null means that the rows are whole.
  const float* means = nullptr;
};

// Both functions return the unique rows, ascending, whose gradient is not finite. With check_finite these
// rows stay unchanged; without check_finite no gradient is checked, and no row is returned.
std::vector<std::int32_t> UpdatePooled(const Touched& touched, const PooledGrads& grads,
                                       const OptimizerStep& step, bool check_finite, RowSquares squares = {});
// The gradient of position p is grad[p * stride ...].
std::vector<std::int32_t> UpdateRows(const Touched& touched, std::int64_t num_positions, const float* grad,
                                     std::int64_t stride, const OptimizerStep& step, bool check_finite,
                                     RowSquares squares = {});

}  // namespace tierstore
