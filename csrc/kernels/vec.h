// Vectors of W floats that every instruction set rounds alike, and loops over the columns of a row.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/isa.h"

// Vectors wider than the baseline's registers only ever live inside one inlined function.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace tierstore {

template <int W>
struct VecTypes {
  typedef float Float __attribute__((vector_size(4 * W)));
  typedef std::int32_t Int __attribute__((vector_size(4 * W)));
};
template <>
struct VecTypes<1> {
  using Float = float;
  using Int = std::int32_t;
};

template <typename T>
TIERSTORE_INLINE void Load(T& vector, const void* from) {
  std::memcpy(&vector, from, sizeof(T));
}
template <typename T>
TIERSTORE_INLINE void Store(void* to, const T& vector) {
  std::memcpy(to, &vector, sizeof(T));
}

// N vectors of W columns each, kept in registers by the callee of ForColumns.
template <int W, int N>
struct Block {
  static constexpr int kLanes = W;
  static constexpr int kVectors = N;
};

// Calls body(Block<w, n>{}, first_column) for blocks that together cover columns [0, dim) once.
template <int W, typename Body>
TIERSTORE_INLINE void ForColumns(std::int64_t dim, const Body& body) {
  std::int64_t c = 0;
  for (; dim - c >= 8 * W; c += 8 * W) body(Block<W, 8>{}, c);
  if (dim - c >= 4 * W) body(Block<W, 4>{}, c), c += 4 * W;
  if (dim - c >= 2 * W) body(Block<W, 2>{}, c), c += 2 * W;
  if (dim - c >= W) body(Block<W, 1>{}, c), c += W;
  if constexpr (W > 8) {
    if (dim - c >= 8) body(Block<8, 1>{}, c), c += 8;
  }
  if constexpr (W > 4) {
    if (dim - c >= 4) body(Block<4, 1>{}, c), c += 4;
  }
  for (; c < dim; ++c) body(Block<1, 1>{}, c);
}

// A sum over columns has the same 16 partial sums on every instruction set: column c goes to lane c mod 16,
// and the lanes are combined as ((l0+l8)+(l4+l12)) + ((l2+l10)+(l6+l14)) + the same of the odd ones.
inline constexpr int kSumLanes = 16;

TIERSTORE_INLINE float CombineLanes(float* lanes) {
  for (int width = kSumLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Sum over columns of x[c] * y[c].
template <int W>
TIERSTORE_INLINE float Dot(const float* x, const float* y, std::int64_t dim) {
  constexpr int kVectors = kSumLanes / W;
  using V = typename VecTypes<W>::Float;
  V sums[kVectors] = {};
  std::int64_t c = 0;
  for (; c + kSumLanes <= dim; c += kSumLanes) {
    for (int i = 0; i < kVectors; ++i) {
      V a, b;
      Load(a, x + c + i * W);
      Load(b, y + c + i * W);
      sums[i] += a * b;
    }
  }
  float lanes[kSumLanes];
  Store(lanes, sums);
  for (int i = 0; c < dim; ++c, ++i) lanes[i] += x[c] * y[c];
  return CombineLanes(lanes);
}

inline constexpr std::uintptr_t kCacheLine = 64;

template <bool kWrite>
TIERSTORE_INLINE void Prefetch(const void* address, std::int64_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  for (std::uintptr_t line = begin & ~(kCacheLine - 1); line < begin + bytes; line += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(line), kWrite, 3);
  }
}

}  // namespace tierstore
