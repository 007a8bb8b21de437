// Deduplicates the ids of one lookup: a Batch has the unique keys in order of first occurrence, and for every
// position the index of its unique key.
#pragma once

#include <cstdint>
#include <vector>

#include "common/page_allocator.h"

namespace tierstore {

// An IdSegment has the ids of one feature. `bound` is the table's number of rows; ids equal to `padding` are
// skipped.
struct IdSegment {
  const void* ids = nullptr;
  std::int64_t count = 0;
  bool is_int32 = false;
  std::uint32_t table = 0;
  std::int64_t bound = 0;
  std::int64_t padding = -1;
};

// A range has the positions begin .. end - 1.
struct PositionRange {
  std::int64_t begin, end;
};

// PositionParts divides positions so that no two parts use the same key.
using PositionParts = std::vector<std::vector<PositionRange>>;

struct Batch {
  PageVector<std::uint64_t> unique;
  PageVector<std::int32_t> inverse;  // -1: skipped (padding)
  PositionParts parts;               // of a large lookup; empty: one part
};

// BadId is the first id that is out of its table's range. `segment` is -1 when there is no such id.
struct BadId {
  std::int64_t segment = -1;
  std::int64_t position = 0;
  std::int64_t id = 0;
};

// Fills `batch`, which must not be used if an id is bad. Segments of one table must have one bound. Large
// lookups are deduplicated table by table, so that the keys of a table stay in the processor's cache, and
// threads of the pool share the tables; the result is the same for any number of threads. Throws
// std::length_error past 2^31 - 1 positions.
BadId Deduplicate(const std::vector<IdSegment>& segments, Batch* batch);

}  // namespace tierstore
