// Transposes lookups for Python.
#pragma once

#include <cstdint>
#include <span>

#include "bindings/arrays.h"
#include "cache/csr.h"

namespace tierstore {

// Returns (start, positions): the positions of every unique row. Call it with the interpreter's lock.
inline pybind11::tuple Transposed(std::span<const std::int32_t> inverse, const PositionParts& parts,
                                  std::int64_t num_unique) {
  Array<std::int32_t> start = Fresh<std::int32_t>(num_unique + 1);
  std::int32_t* starts = start.mutable_data();
  {
    pybind11::gil_scoped_release release;
    CountPositions(inverse, parts, num_unique, starts);
  }
  Array<std::int32_t> positions = Fresh<std::int32_t>(starts[num_unique]);
  std::int32_t* to = positions.mutable_data();
  {
    pybind11::gil_scoped_release release;
    PlacePositions(inverse, parts, num_unique, starts, to);
  }
  return pybind11::make_tuple(start, positions);
}

}  // namespace tierstore
