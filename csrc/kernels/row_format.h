// Encodes rows in fewer bytes, as tiers below the first hold rows: weights as bfloat16, IEEE half precision
// or one byte each, the optimizer's state as float32 or bfloat16. Rows that kernels work on ("wide" rows) are
// float32.
//
// An encoded row is the weights; zeros up to a multiple of 4 bytes; for kInt8 the step and the offset
// (float32: weight = q * step + offset, fbgemm's layout of row-wise quantisation); the state; zeros up to a
// multiple of 16 bytes.
//
// The step of kInt8 is the smallest power of two, at least 2^-126, for which all weights lie between two of
// 256 neighbouring multiples of the step, none of them more than 32 767 steps from 0; the offset is the
// lowest of these multiples. A row of equal weights has step 0. So decoding is exact arithmetic, and a row
// that was decoded is encoded to the same weights. A row that has no such step (NaN, infinity, a span of
// 2^127) decodes to NaN in every weight.
//
// Rounding is to the nearest value (ties to even) or stochastic: up with the probability of the part that is
// cut off, to 16 bits. The random bits are a pure function of the table's seed, the id, the column and the
// wide row itself. The bits are halves of the words of Philox4x32-10 with the table's seed as the key and the
// counter (id mod 2^32, id >> 32, column div 8, hash of the row | 1). (Counters of initial values end in 0.)
// A value that the format has stays the same, so a row that was decoded and not changed is encoded to equal
// values. Finite values stay finite: beyond the largest number of the format they become that number.
#pragma once

#include <cstdint>

#include "kernels/rows.h"

namespace tierstore {

struct RowFormat {
  WeightType weights;
  bool short_state;  // bfloat16 instead of float32
  bool stochastic;
  std::int64_t dim;
  std::int64_t state_floats;

  std::int64_t weight_bytes() const { return WeightBytes(weights) * dim; }
  // Returns where the step and the offset are, or the state where there is no step.
  std::int64_t rest() const { return StateBegin(weights, dim); }
  std::int64_t state() const { return rest() + (weights == WeightType::kInt8 ? 8 : 0); }
  std::int64_t row_bytes() const { return (state() + (short_state ? 2 : 4) * state_floats + 15) / 16 * 16; }
  std::int64_t wide_floats() const { return dim + state_floats; }
};

// TableSeeds has the seed of each table for stochastic rounding; null rounds to the nearest value.
struct TableSeeds {
  const std::uint64_t* seeds;
  std::int64_t num_tables;
};

// Sets to[i] to the encoded row of rows[slots[i]], or of rows[i] where slots is null; `to` is contiguous.
// Returns the first i whose row is kInt8 and decodes to NaN, or -1.
std::int64_t EncodeRows(Rows rows, const std::int32_t* slots, const std::uint64_t* keys, std::int64_t n,
                        const RowFormat& format, const TableSeeds& tables, std::uint8_t* to);

// Sets rows[slots ? slots[i] : i] to the wide row of from[source ? source[i] : i], with zero padding; slots
// must not repeat.
void DecodeRows(Rows rows, const std::int32_t* slots, const std::int32_t* source, std::int64_t n,
                const RowFormat& format, const std::uint8_t* from);

}  // namespace tierstore
