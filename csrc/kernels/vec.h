// Defines vectors of W floats that every instruction set rounds alike, and loops over the columns of a row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/isa.h"

// Vectors wider than the baseline's registers live only inside one inlined function.
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

// A Block is N vectors of W columns each, which the callee of ForColumns keeps in registers.
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

// Calls body(dim), with the usual dims as constants, for which loops over columns unroll.
template <typename Body>
TIERSTORE_INLINE void WithDim(std::int64_t dim, const Body& body) {
  switch (dim) {
    case 16:
      return body(std::integral_constant<std::int64_t, 16>{});
    case 32:
      return body(std::integral_constant<std::int64_t, 32>{});
    case 64:
      return body(std::integral_constant<std::int64_t, 64>{});
    case 128:
      return body(std::integral_constant<std::int64_t, 128>{});
    default:
      return body(dim);
  }
}

template <int W>
TIERSTORE_INLINE typename VecTypes<W>::Float Sqrt(const typename VecTypes<W>::Float& x) {
  typename VecTypes<W>::Float root;
  if constexpr (W == 1) {
    root = std::sqrt(x);
  } else {
    for (int i = 0; i < W; ++i) root[i] = std::sqrt(x[i]);
  }
  return root;
}

// A sum over columns has the same 16 partial sums on every instruction set: column c goes to lane c mod 16,
// and then lane i is added to lane i - 8, i - 4, i - 2 and i - 1 in turn.
inline constexpr int kSumLanes = 16;

template <typename Half, typename V>
TIERSTORE_INLINE Half AddHalves(const V& v) {
  Half low, high;
  Load(low, &v);
  Load(high, reinterpret_cast<const char*>(&v) + sizeof(Half));
  return low + high;
}

template <int W>
TIERSTORE_INLINE float CombineLanes(const typename VecTypes<W>::Float (&sums)[kSumLanes / W]) {
  using V4 = VecTypes<4>::Float;
  using V8 = VecTypes<8>::Float;
  V4 quarter;
  if constexpr (W == 16) {
    quarter = AddHalves<V4>(AddHalves<V8>(sums[0]));
  } else if constexpr (W == 8) {
    quarter = AddHalves<V4>(sums[0] + sums[1]);
  } else {
    static_assert(W == 4);
    quarter = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// Returns the sum over columns of x[c] * y[c].
template <int W>
TIERSTORE_INLINE float Dot(const float* x, const float* y, std::int64_t dim) {
  constexpr int kVectors = kSumLanes / W;
  using V = typename VecTypes<W>::Float;
  V sums[kVectors] = {};
  const auto add = [&](const float* a, const float* b) __attribute__((always_inline)) {
    for (int i = 0; i < kVectors; ++i) {
      V p, q;
      Load(p, a + i * W);
      Load(q, b + i * W);
      sums[i] += p * q;
    }
  };
  std::int64_t c = 0;
  for (; c + kSumLanes <= dim; c += kSumLanes) add(x + c, y + c);
  if (c < dim) {
    // Adding zero to the other lanes changes no bit: a sum that starts from +0 is never -0.
    float a[kSumLanes] = {}, b[kSumLanes] = {};
    for (std::int64_t i = 0; c + i < dim; ++i) a[i] = x[c + i], b[i] = y[c + i];
    add(a, b);
  }
  return CombineLanes<W>(sums);
}

inline constexpr std::int64_t kCacheLine = 64;

// Returns how many items of `bytes` bytes to prefetch ahead: enough to hide the latency of memory, and few
// enough to stay in the first-level cache until they are used.
inline std::int64_t PrefetchAhead(std::int64_t bytes) {
  constexpr std::int64_t kBytesAhead = 10 << 10;
  return std::clamp<std::int64_t>(kBytesAhead / bytes, 2, 32);
}

// The number of steps must not depend on the address, which arrives late from memory: a mispredicted end of
// this loop would cost more than the prefetch saves.
template <bool kWrite>
TIERSTORE_INLINE void Prefetch(const void* address, std::int64_t bytes) {
  const char* begin = static_cast<const char*>(address);
  for (std::int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(begin + i, kWrite, 3);
  __builtin_prefetch(begin + bytes - 1, kWrite, 3);
}

}  // namespace tierstore
