// Converts single numbers to fewer bits and back; kernels/row_format.h says which numbers of a row. `dice`,
// 16 random bits, decides whether a number is rounded up; without kStochastic, rounding is to the nearest
// value, ties to even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/rows.h"
#include "kernels/vec.h"

namespace tierstore {

inline constexpr std::uint32_t kInfinityBits = 0x7F800000;

TIERSTORE_INLINE std::uint32_t BitsOf(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

TIERSTORE_INLINE float OfBits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns the number to add to `bits` before the lowest `cut` bits are cut off. `dice` has at least `cut`
// bits. A Word has 32 bits, or is a vector of words of 32 bits.
template <bool kStochastic, typename Word>
TIERSTORE_INLINE Word Rounding(const Word& bits, int cut, const Word& dice) {
  const std::uint32_t below = (1u << cut) - 1;
  if constexpr (kStochastic) return dice & below;
  return (bits >> cut & 1u) + (below >> 1);
}

// These vectors have W numbers of 16 bits, or of 32 bits.
template <int W>
struct ShortTypes {
  typedef std::uint16_t Shorts __attribute__((vector_size(2 * W)));
  typedef std::uint32_t Words __attribute__((vector_size(4 * W)));
};
template <>
struct ShortTypes<1> {
  using Shorts = std::uint16_t;
  using Words = std::uint32_t;
};

// Converts the elements of a vector (or a number) to another type.
template <typename To, typename From>
TIERSTORE_INLINE To Converted(const From& from) {
  if constexpr (std::is_arithmetic_v<From>) {
    return static_cast<To>(from);
  } else {
    return __builtin_convertvector(from, To);
  }
}

// Returns the bits of a vector (or a number) as another type.
template <typename To, typename From>
TIERSTORE_INLINE To Cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  Load(to, &from);
  return to;
}

// Returns a where the comparison holds, else b. The operator ?: would not do: the compiler splits comparisons
// that depend on one another into single elements.
template <typename Holds, typename Words>
TIERSTORE_INLINE Words Select(const Holds& holds, const Words& a, const Words& b) {
  if constexpr (std::is_same_v<Holds, bool>) {
    return holds ? a : b;
  } else {
    const Words mask = Cast<Words>(holds);
    return (a & mask) | (b & ~mask);
  }
}

// The types below convert W numbers at once, in vectors of 32 bits each, with the same results for every W. W
// is 8 or more only where a kernel is compiled for AVX2 or better.
struct Bfloat16 {
  static constexpr WeightType kType = WeightType::kBfloat16;

  template <bool kStochastic, int W>
  TIERSTORE_INLINE static typename ShortTypes<W>::Shorts To(const typename VecTypes<W>::Float& values,
                                                            const typename ShortTypes<W>::Words& dice) {
    using Words = typename ShortTypes<W>::Words;
    using Ints = typename VecTypes<W>::Int;
    constexpr std::int32_t kLargest = 0x7F7F, kInfinity = kInfinityBits;
    constexpr std::uint32_t kQuiet = 0x40;
    const Words bits = Cast<Words>(values), magnitude = bits & 0x7FFFFFFFu;
    Words finite = (magnitude + Rounding<kStochastic>(magnitude, 16, dice)) >> 16;
    finite = Select(Cast<Ints>(finite) < kLargest, finite, Words{} + kLargest);
    const Ints order = Cast<Ints>(magnitude);
    const Words other = magnitude >> 16 | Select(order > kInfinity, Words{} + kQuiet, Words{});
    return Converted<typename ShortTypes<W>::Shorts>(Select(order < kInfinity, finite, other) |
                                                     (bits >> 16 & 0x8000u));
  }

  template <int W>
  TIERSTORE_INLINE static typename VecTypes<W>::Float From(const typename ShortTypes<W>::Shorts& shorts) {
    return Cast<typename VecTypes<W>::Float>(Converted<typename ShortTypes<W>::Words>(shorts) << 16);
  }
};

struct Half {
  static constexpr WeightType kType = WeightType::kHalf;

  template <bool kStochastic, int W>
  TIERSTORE_INLINE static typename ShortTypes<W>::Shorts To(const typename VecTypes<W>::Float& values,
                                                            const typename ShortTypes<W>::Words& dice) {
    using Words = typename ShortTypes<W>::Words;
    using Ints = typename VecTypes<W>::Int;
    using Floats = typename VecTypes<W>::Float;
    constexpr std::int32_t kLeastNormal = 0x38800000, kLargest = 0x7BFF, kInfinity = kInfinityBits;
    constexpr std::uint32_t kRebias = 112 << 10, kShortInfinity = 0x7C00, kQuiet = 0x7E00;
    const Words bits = Cast<Words>(values), magnitude = bits & 0x7FFFFFFFu;
    const Ints order = Cast<Ints>(magnitude);
#if TIERSTORE_X86
    if constexpr (!kStochastic && W >= 8) {
      constexpr std::int32_t kWideLargest = 0x477FE000;  // 65504
      const Words clamped = Select(order < kWideLargest, magnitude, Words{} + kWideLargest);
      return Processors<W>(Select(order < kInfinity, clamped, magnitude) | (bits & 0x80000000u));
    }
#endif
    const Words normal = ((magnitude + Rounding<kStochastic>(magnitude, 13, dice)) >> 13) - kRebias;
    // Subnormal numbers are multiples of 2^-24. `fixed` keeps 16 more bits; its last bit is set where any
    // lower bit is set.
    const Floats scaled = Cast<Floats>(Select(order < kLeastNormal, magnitude, Words{})) * 0x1p40f;
    const Ints whole = Converted<Ints>(scaled);
    const Words further = Select(Converted<Floats>(whole) < scaled, Words{} + 1u, Words{});
    const Words fixed = Cast<Words>(whole) | further;
    const Words small = (fixed + Rounding<kStochastic>(fixed, 16, dice)) >> 16;
    Words finite = Select(order < kLeastNormal, small, normal);
    finite = Select(Cast<Ints>(finite) < kLargest, finite, Words{} + kLargest);
    const Words other =
        Select(order > kInfinity, (magnitude >> 13 & 0x3FFu) | kQuiet, Words{} + kShortInfinity);
    return Converted<typename ShortTypes<W>::Shorts>(Select(order < kInfinity, finite, other) |
                                                     (bits >> 16 & 0x8000u));
  }

  template <int W>
  TIERSTORE_INLINE static typename VecTypes<W>::Float From(const typename ShortTypes<W>::Shorts& shorts) {
    using Words = typename ShortTypes<W>::Words;
    using Floats = typename VecTypes<W>::Float;
#if TIERSTORE_X86
    if constexpr (W >= 8) {
      Floats wide;
      asm("vcvtph2ps %1, %0" : "=v"(wide) : "v"(shorts));
      return wide;
    }
#endif
    constexpr std::int32_t kLeastNormal = 0x400 << 13, kInfinity = 0x7C00 << 13;
    constexpr std::uint32_t kQuiet = 0x400000;
    const Words words = Converted<Words>(shorts);
    const Words magnitude = (words & 0x7FFFu) << 13, sign = (words & 0x8000u) << 16;
    // A subnormal number, with the exponent of 2^-14, is 2^-14 too large. So no operand is subnormal in
    // float32: some modes of the processor take subnormal operands for 0.
    const Words small = Cast<Words>(Cast<Floats>(magnitude + (113u << 23)) - 0x1p-14f);
    const auto order = Cast<typename VecTypes<W>::Int>(magnitude);
    const Words normal = magnitude + (112u << 23), finite = Select(order < kLeastNormal, small, normal);
    const Words other =
        magnitude | (order > kInfinity ? Words{} + (kInfinityBits | kQuiet) : Words{} + kInfinityBits);
    return Cast<Floats>(Select(order < kInfinity, finite, other) | sign);
  }

 private:
#if TIERSTORE_X86
  // Converts float32 to the nearest value by the processor's instruction, which gives infinity beyond the
  // largest number.
  template <int W>
  TIERSTORE_INLINE static typename ShortTypes<W>::Shorts Processors(
      const typename ShortTypes<W>::Words& values) {
    typename ShortTypes<W>::Shorts shorts;
    asm("vcvtps2ph $0, %1, %0" : "=v"(shorts) : "v"(values));
    return shorts;
  }
#endif
};

// The weights of a row may have the values offset + q * step, q < 256.
struct Grid {
  float step;
  float offset;
  float per_step;       // 1 / step
  std::int32_t lowest;  // offset / step
  bool fits;
};

TIERSTORE_INLINE Grid GridOf(const float* row, std::int64_t dim) {
  constexpr int kLanes = 16;
  constexpr float kMostSteps = 32767.0f, kMostSpan = 0x1p127f;
  float low[kLanes], high[kLanes];
  std::uint32_t largest[kLanes];
  for (int i = 0; i < kLanes; ++i) low[i] = high[i] = row[0], largest[i] = 0;
  std::int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const float value = row[c + i];
      const std::uint32_t magnitude = BitsOf(value) & 0x7FFFFFFF;
      low[i] = value < low[i] ? value : low[i];
      high[i] = value > high[i] ? value : high[i];
      largest[i] = magnitude > largest[i] ? magnitude : largest[i];
    }
  }
  for (; c < dim; ++c) {
    const std::uint32_t magnitude = BitsOf(row[c]) & 0x7FFFFFFF;
    low[0] = row[c] < low[0] ? row[c] : low[0];
    high[0] = row[c] > high[0] ? row[c] : high[0];
    largest[0] = magnitude > largest[0] ? magnitude : largest[0];
  }
  for (int i = 1; i < kLanes; ++i) {
    low[0] = low[i] < low[0] ? low[i] : low[0];
    high[0] = high[i] > high[0] ? high[i] : high[0];
    largest[0] = largest[i] > largest[0] ? largest[i] : largest[0];
  }
  if (largest[0] >= kInfinityBits || !(high[0] - low[0] < kMostSpan)) {
    const float nan = OfBits(0x7FC00000);
    return {nan, nan, 0.0f, 0, false};
  }
  if (low[0] == high[0]) return {0.0f, low[0] + 0.0f, 0.0f, 0, true};
  // Rounded to float32, the least step is at most one power of two too small or too large.
  const float span = high[0] - low[0], most = OfBits(largest[0]);
  const float least = span / 255.0f > most / kMostSteps ? span / 255.0f : most / kMostSteps;
  std::int32_t exponent = static_cast<std::int32_t>(BitsOf(least) >> 23) - 128;
  exponent = exponent > -126 ? exponent : -126;
  for (;; ++exponent) {
    const float per_step = OfBits(static_cast<std::uint32_t>(127 - exponent) << 23);
    const float first = std::floor(low[0] * per_step), last = std::ceil(high[0] * per_step);
    if (last - first > 255.0f || first < -kMostSteps || last > kMostSteps) continue;
    const float step = OfBits(static_cast<std::uint32_t>(exponent + 127) << 23);
    return {step, first * step + 0.0f, per_step, static_cast<std::int32_t>(first), true};
  }
}

template <bool kStochastic>
TIERSTORE_INLINE std::uint8_t Quantise(const Grid& grid, float value, std::uint32_t dice) {
  // `whole` counts 2^-16 steps, rounded down; its last bit is set where bits were cut off. |value| is at most
  // 2^15 steps.
  const float scaled = value * grid.per_step * 0x1p16f;
  std::int32_t whole = static_cast<std::int32_t>(scaled);
  whole -= static_cast<float>(whole) > scaled ? 1 : 0;
  whole |= static_cast<float>(whole) < scaled ? 1 : 0;
  const std::uint32_t bits = static_cast<std::uint32_t>(whole);
  const std::int32_t rounded = static_cast<std::int32_t>(bits + Rounding<kStochastic>(bits, 16, dice)) >> 16;
  return static_cast<std::uint8_t>(rounded - grid.lowest);
}

}  // namespace tierstore
