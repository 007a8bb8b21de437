// Single numbers in fewer bits; kernels/row_format.h says what of. `dice`, 16 random bits, decides what is
// rounded up; without kStochastic rounding is to the nearest value, ties to even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/isa.h"

namespace tierstore {

constexpr std::uint32_t kInfinityBits = 0x7F800000;

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

// What to add to `bits` before its lowest `cut` bits are cut off. `dice` has at least `cut` bits.
template <bool kStochastic>
TIERSTORE_INLINE std::uint32_t Rounding(std::uint32_t bits, int cut, std::uint32_t dice) {
  const std::uint32_t below = (1u << cut) - 1;
  return kStochastic ? dice & below : (below >> 1) + (bits >> cut & 1);
}

struct Bfloat16 {
  template <bool kStochastic>
  TIERSTORE_INLINE static std::uint16_t To(float value, std::uint32_t dice) {
    constexpr std::uint32_t kLargest = 0x7F7F, kQuiet = 0x40;
    const std::uint32_t bits = BitsOf(value), magnitude = bits & 0x7FFFFFFF;
    std::uint32_t finite = (magnitude + Rounding<kStochastic>(magnitude, 16, dice)) >> 16;
    finite = finite < kLargest ? finite : kLargest;
    const std::uint32_t other = magnitude >> 16 | (magnitude > kInfinityBits ? kQuiet : 0);
    const std::uint32_t result = magnitude < kInfinityBits ? finite : other;
    return static_cast<std::uint16_t>(result | (bits >> 16 & 0x8000));
  }

  TIERSTORE_INLINE static float From(std::uint16_t bits) {
    return OfBits(static_cast<std::uint32_t>(bits) << 16);
  }
};

struct Half {
  template <bool kStochastic>
  TIERSTORE_INLINE static std::uint16_t To(float value, std::uint32_t dice) {
    constexpr std::uint32_t kLeastNormal = 0x38800000, kRebias = 112 << 10;
    constexpr std::uint32_t kLargest = 0x7BFF, kInfinity = 0x7C00, kQuiet = 0x7E00;
    const std::uint32_t bits = BitsOf(value), magnitude = bits & 0x7FFFFFFF;
    const std::uint32_t normal = ((magnitude + Rounding<kStochastic>(magnitude, 13, dice)) >> 13) - kRebias;
    // Subnormal numbers are multiples of 2^-24: 16 bits below that, and a last bit that tells of further
    // ones.
    const float scaled = OfBits(magnitude < kLeastNormal ? magnitude : 0) * 0x1p40f;
    const std::int32_t whole = static_cast<std::int32_t>(scaled);
    const std::uint32_t fixed =
        static_cast<std::uint32_t>(whole | (static_cast<float>(whole) < scaled ? 1 : 0));
    const std::uint32_t small = (fixed + Rounding<kStochastic>(fixed, 16, dice)) >> 16;
    std::uint32_t finite = magnitude < kLeastNormal ? small : normal;
    finite = finite < kLargest ? finite : kLargest;
    const std::uint32_t other = magnitude > kInfinityBits ? kQuiet : kInfinity;
    const std::uint32_t result = magnitude < kInfinityBits ? finite : other;
    return static_cast<std::uint16_t>(result | (bits >> 16 & 0x8000));
  }

  TIERSTORE_INLINE static float From(std::uint16_t half) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7FFF) << 13;
    // As bits of a float32 the number is 2^-112 times too small; subnormal numbers come out right, too.
    const std::uint32_t finite = BitsOf(OfBits(magnitude) * 0x1p112f);
    const std::uint32_t other = magnitude | kInfinityBits;
    return OfBits((magnitude < (0x7C00u << 13) ? finite : other) | static_cast<std::uint32_t>(half & 0x8000)
                                                                       << 16);
  }
};

// The values that the weights of a row may have: offset + q * step, q < 256.
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
  // Steps times 2^16, rounded down; the last bit tells of what was cut off. |value| is at most 2^15 steps.
  const float scaled = value * grid.per_step * 0x1p16f;
  std::int32_t whole = static_cast<std::int32_t>(scaled);
  whole -= static_cast<float>(whole) > scaled ? 1 : 0;
  whole |= static_cast<float>(whole) < scaled ? 1 : 0;
  const std::uint32_t bits = static_cast<std::uint32_t>(whole);
  const std::int32_t rounded = static_cast<std::int32_t>(bits + Rounding<kStochastic>(bits, 16, dice)) >> 16;
  return static_cast<std::uint8_t>(rounded - grid.lowest);
}

}  // namespace tierstore
