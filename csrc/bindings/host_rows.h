// Rows in host memory as Python holds them, and the arguments of the kernels that work on them. Argument
// structs are filled by name, checked when they are made and never changed; they keep their arrays alive.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/registry.h"
#include "kernels/bags.h"
#include "kernels/init.h"
#include "kernels/optimizer.h"
#include "kernels/rows.h"

namespace tierstore {

using Address = std::uintptr_t;

inline void Require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Memory of rows that `owner` keeps. Throws std::invalid_argument unless row_bytes is a multiple of 16.
class HostRows {
 public:
  HostRows(std::uint8_t* base, std::int64_t row_bytes, pybind11::object owner)
      : rows_{base, row_bytes}, owner_(std::move(owner)) {
    Require(row_bytes > 0 && row_bytes % 16 == 0, "row_bytes must be a positive multiple of 16");
  }

  std::int64_t row_bytes() const { return rows_.row_bytes; }
  // The rows, which must have room for so many floats each.
  Rows Of(std::int64_t floats) const {
    Require(4 * floats <= rows_.row_bytes,
            "row_bytes is smaller than the weights and optimizer state of a row");
    return rows_;
  }

 private:
  Rows rows_;
  pybind11::object owner_;
};

struct InitialValues {
  std::int64_t dim;
  std::int64_t state_floats;
  float state_value;
  Array<std::uint8_t> kinds;
  Array<float> a, b;
  Array<std::uint64_t> seeds;
  std::optional<Array<std::int64_t>> columns;

  InitialValues Checked() &&;
  TableInit Tables() const;
};

struct BagArgs {
  Array<std::int64_t> offsets, bag_start, out_offset, out_stride;
  Array<std::uint8_t> modes;

  BagArgs Checked() &&;
  // Checks the contents, too: others may have changed the arrays since the last call.
  Bags Get() const;
};

struct LookupArgs {
  std::int64_t dim;
  Array<std::int32_t> slots, inverse;

  LookupArgs Checked() &&;
};

struct UpdateArgs {
  std::int64_t dim;
  Array<std::int32_t> slots, csr_start, csr_positions;
  OptimizerStep step;
  bool check_finite;
  std::optional<Array<float>> squares, means;

  UpdateArgs Checked() &&;
};

// Adds the classes above to the module.
void BindRowArguments(pybind11::module_& m);

}  // namespace tierstore
