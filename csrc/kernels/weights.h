// Defines the types of weights in a memory tier that kernels work on, as template arguments of kernels.
// Kernels compute in float32.
#pragma once

#include "kernels/short_rows.h"
#include "kernels/vec.h"

namespace tierstore {

struct FloatWeights {
  static constexpr WeightType kType = WeightType::kFloat32;
  static constexpr std::int64_t kBytes = 4;

  // Loads W weights of a row.
  template <int W>
  TIERSTORE_INLINE static typename VecTypes<W>::Float LoadVector(const std::uint8_t* from) {
    typename VecTypes<W>::Float vector;
    Load(vector, from);
    return vector;
  }
  // Returns the weights of a row as float32: in place, or in `room` for `dim` floats.
  template <int W>
  TIERSTORE_INLINE static float* Widen(std::uint8_t* row, std::int64_t, float*) {
    return reinterpret_cast<float*>(row);
  }
};

template <typename Short>
struct ShortWeights {
  static constexpr WeightType kType = Short::kType;
  static constexpr std::int64_t kBytes = 2;

  template <int W>
  TIERSTORE_INLINE static typename VecTypes<W>::Float LoadVector(const std::uint8_t* from) {
    return LoadShorts<W, Short>(from);
  }
  template <int W>
  TIERSTORE_INLINE static float* Widen(std::uint8_t* row, std::int64_t dim, float* room) {
    FromShort<W, Short>(row, dim, room);
    return room;
  }
  // Writes weights that were computed in float32 back into their row.
  template <int W, bool kStochastic>
  TIERSTORE_INLINE static void Narrow(const float* from, std::int64_t dim, std::int64_t column,
                                      const Dice& dice, std::uint8_t* row) {
    ToShort<W, kStochastic, Short>(from, dim, column, dice, row);
  }
};

// Calls body(FloatWeights{} or ShortWeights<...>{}), the type of the rows' weights.
template <typename Body>
TIERSTORE_INLINE void WithWeights(WeightType type, const Body& body) {
  switch (type) {
    case WeightType::kBfloat16:
      return body(ShortWeights<Bfloat16>{});
    case WeightType::kHalf:
      return body(ShortWeights<Half>{});
    default:
      return body(FloatWeights{});
  }
}

}  // namespace tierstore
