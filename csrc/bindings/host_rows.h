// Holds rows in host memory for Python, and the arguments of the kernels that work on the rows. Argument
// structs are filled by name, checked when they are made and never changed; they keep their arrays alive.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/registry.h"
#include "cache/reserved_memory.h"
#include "common/key.h"
#include "kernels/bags.h"
#include "kernels/init.h"
#include "kernels/optimizer.h"
#include "kernels/row_format.h"
#include "kernels/rows.h"

namespace tierstore {

using Address = std::uintptr_t;

inline void Require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}
// Throws std::invalid_argument unless the table of each of `n` keys is below `tables`.
inline void RequireTables(const std::uint64_t* keys, std::int64_t n, std::int64_t tables,
                          const char* message) {
  bool known = true;
  for (std::int64_t i = 0; i < n; ++i) known &= KeyTable(keys[i]) < tables;
  Require(known, message);
}
inline constexpr const char* kNoKind = "a key's table has no entry in kinds";
inline constexpr const char* kNoSeed = "a key's table has no entry in seeds";

// Returns the type that "fp32", "bf16", "fp16" or "int8" names. Throws std::invalid_argument.
WeightType WeightsOf(const std::string& name);

// HostRows has rows by slot, in an arena of their own or in the memory of an array. The constructors throw
// std::invalid_argument unless row_bytes is a multiple of 16 and weights are not int8.
class HostRows {
 public:
  // Reserves address space for this many slots, none of which has memory yet. Throws AddressSpaceError.
  HostRows(std::int64_t slots, std::int64_t row_bytes, WeightType weights)
      : slots_(slots), rows_{nullptr, row_bytes, weights} {
    Check();
    Require(slots >= 1, "rows need at least one slot");
    arena_.emplace(Bytes(slots));
    rows_.base = reinterpret_cast<std::uint8_t*>(arena_->data());
  }
  // Takes the rows of an array (n, row_bytes).
  HostRows(Array<std::uint8_t> array, WeightType weights)
      : slots_(array.shape(0)),
        rows_{array.mutable_data(), array.shape(1), weights},
        array_(std::move(array)) {
    Check();
  }

  // Gives the first `slots` slots memory, zeros at first. An arena does not move. Throws AddressSpaceError.
  void Commit(std::int64_t slots) {
    Require(slots <= slots_, "there are not so many slots");
    if (arena_) arena_->Commit(Bytes(slots));
  }
  // Notes that the slots from `first` on hold no rows any more. An arena gives their pages back to the system
  // until the slots are written again.
  void Discard(std::int64_t first) {
    if (arena_) arena_->Discard(Bytes(first));
  }

  std::int64_t row_bytes() const { return rows_.row_bytes; }
  // Returns an array (slots, row_bytes) of the rows, which `self` is the Python object of.
  Array<std::uint8_t> ToArray(const pybind11::object& self) const {
    return Array<std::uint8_t>({slots_, row_bytes()}, rows_.base, self);
  }
  // Returns the rows, each of which must have room for `dim` weights and this many floats of state.
  Rows Of(std::int64_t dim, std::int64_t state_floats = 0) const {
    Require(StateBegin(rows_.weights, dim) + 4 * state_floats <= rows_.row_bytes,
            "row_bytes is smaller than the weights and optimizer state of a row");
    return rows_;
  }

 private:
  void Check() const {
    Require(row_bytes() > 0 && row_bytes() % 16 == 0, "row_bytes must be a positive multiple of 16");
    Require(rows_.weights != WeightType::kInt8, "kernels do not work on int8 weights");
  }
  std::size_t Bytes(std::int64_t slots) const { return static_cast<std::size_t>(slots * row_bytes()); }

  std::int64_t slots_;
  Rows rows_;
  std::optional<ReservedMemory> arena_;
  pybind11::object array_;
};

struct InitialValues {
  std::int64_t dim;
  std::int64_t state_floats;
  float state_value;
  Array<std::uint8_t> kinds;
  Array<float> first, second;  // parameters of each table's kind (kernels/init.h)
  Array<std::uint64_t> seeds;
  std::optional<Array<std::int64_t>> columns;

  InitialValues Checked() &&;
  TableInit Tables() const;
};

// A RowCodec is a row format with the seeds of the tables, for stochastic rounding.
struct RowCodec {
  RowFormat format;
  std::optional<Array<std::uint64_t>> seeds;

  static RowCodec Make(const std::string& weights, const std::string& state, std::int64_t dim,
                       std::int64_t state_floats, std::optional<Array<std::uint64_t>> seeds);
};

struct BagArgs {
  Array<std::int64_t> offsets, bag_start, out_offset, out_stride;
  Array<std::uint8_t> modes;

  BagArgs Checked() &&;
  // Returns the bags for kernels, which check the contents at every call: Python code may change the arrays.
  Bags Get() const;
  bool TakesMax() const;
  // Returns the same bags, whose vectors lie `stride` floats apart.
  BagArgs WithStride(std::int64_t stride) const;
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

// RoundingArgs has the inputs of stochastic rounding of updated weights, beside the number of the step.
struct RoundingArgs {
  Array<std::uint64_t> keys, seeds;
  std::optional<Array<std::int64_t>> columns;

  RoundingArgs Checked() &&;
};

// Adds the classes above to the module.
void BindRowArguments(pybind11::module_& m);
void BindRowCodec(pybind11::module_& m);
// Adds the conversions between wide and encoded rows to HostRows.
void BindConversions(pybind11::class_<HostRows>& type);

}  // namespace tierstore
