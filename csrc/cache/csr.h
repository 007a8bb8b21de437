// Transposes a batch: for every unique row the result has the positions that use the row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/batch.h"

namespace tierstore {

// Sets start[u + 1] to the number of positions of rows 0..u. `start` has num_unique + 1 entries, and
// start[num_unique] is the number of positions that are not skipped (inverse < 0 is skipped). Throws
// std::invalid_argument if an entry is not below num_unique. Threads take a part of the positions each
// (Batch::parts).
void CountPositions(std::span<const std::int32_t> inverse, const PositionParts& parts,
                    std::int64_t num_unique, std::int32_t* start);
// Writes the positions of every row, ascending, to positions[start[u] .. start[u + 1]).
void PlacePositions(std::span<const std::int32_t> inverse, const PositionParts& parts,
                    std::int64_t num_unique, std::int32_t* start, std::int32_t* positions);

// Rows with more than `few` positions, in order: those with more than `piece` are hot, the others long.
struct LongRows {
  std::vector<std::int32_t> hot, others;
  std::vector<std::int32_t> first_piece;  // of each hot row, and the end: the positions in pieces of `piece`
};
LongRows FindLongRows(std::span<const std::int32_t> start, std::int32_t few, std::int32_t piece);

}  // namespace tierstore
