// Computes the initial values of rows as a pure function of (seed, id, column), so the values depend neither
// on the order in which rows are first touched nor on the table's place in a collection, on slots, threads or
// the machine.
#pragma once

#include <cstdint>

#include "kernels/rows.h"

namespace tierstore {

enum class InitKind : std::uint8_t { kConstant = 0, kUniform = 1, kNormal = 2 };

// TableInit says how the weights of each table begin, by one entry per table (key >> 48). `first` and
// `second` are the parameters of the kind:
// - constant (value): value
// - uniform (low, high): min(low + u * (high - low), the float before high), in float32, u = (x >> 8) / 2^24
// - normal (mean, std): float32(mean + std * z) in float64, z the standard normal quantile of
//   (x + 0.5) / 2^32
// where x is word `column mod 4` of Philox4x32-10 with key `seed` and counter (id mod 2^32, id >> 32, column
// div 4, 0). A table that is a range of columns of a wider table begins at its column columns[table].
struct TableInit {
  const InitKind* kinds;
  const float* first;
  const float* second;
  const std::uint64_t* seeds;
  std::int64_t num_tables;
  const std::int64_t* columns = nullptr;  // first column of each table; null: 0
};

// Writes whole records: `dim` weights (rounded to the nearest value where weights have 16 bits), then
// `state_floats` times `state_value`, then zero padding. Row i goes to slot slots[i], or to slot i when slots
// is null; slots must not repeat. Every key's table must be below num_tables.
void InitRows(Rows rows, const std::int32_t* slots, const std::uint64_t* keys, std::int64_t n,
              std::int64_t dim, std::int64_t state_floats, float state_value, const TableInit& tables);

}  // namespace tierstore
