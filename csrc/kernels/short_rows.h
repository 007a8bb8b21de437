// Converts runs of numbers from and to 16 bits, and draws the random bits of stochastic rounding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels/narrow.h"
#include "kernels/philox.h"
#include "kernels/rows.h"

namespace tierstore {

// Dice draws the 16 random bits of each column of one row: halves of the words of Philox4x32-10 with the key
// `seed` and the counter (id mod 2^32, id >> 32, column div 8, last).
struct Dice {
  std::uint64_t id = 0;
  std::uint64_t seed = 0;
  std::uint32_t last = 0;

  template <int kColumns>
  TIERSTORE_INLINE void Throw(std::int64_t column, std::uint32_t (&out)[kColumns]) const {
    const std::int64_t skip = column % 8;
    if (skip == 0) return ThrowEights(column, out);
    std::uint32_t all[kColumns + 8], more[8];  // a shard of columns begins anywhere
    std::uint32_t first[kColumns];
    ThrowEights(column - skip, first);
    ThrowEights(column - skip + kColumns, more);
    std::memcpy(all, first, sizeof first);
    std::memcpy(all + kColumns, more, sizeof more);
    std::memcpy(out, all + skip, sizeof out);
  }

 private:
  // `column` is a multiple of 8.
  template <int kColumns>
  TIERSTORE_INLINE void ThrowEights(std::int64_t column, std::uint32_t (&out)[kColumns]) const {
    constexpr int kCounters = kColumns / 8;
    std::uint32_t words[4][kCounters];
    Philox<kCounters>(static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(id >> 32),
                      static_cast<std::uint32_t>(column / 8), seed, words, last);
    for (int i = 0; i < kCounters; ++i) {
      for (int j = 0; j < 4; ++j) {
        out[8 * i + j] = words[j][i] & 0xFFFF;
        out[8 * i + 4 + j] = words[j][i] >> 16;
      }
    }
  }
};

// Calls body(N, first, count, values, dice) for `count` of `floats` numbers from `first` on, N (a constant)
// at a time; `column` is the column of the first number. Behind the end values are 0.
template <bool kStochastic, typename Body>
TIERSTORE_INLINE void ForChunks(const float* from, std::int64_t floats, std::int64_t column, const Dice& dice,
                                const Body& body) {
  const auto chunk = [&](auto size, std::int64_t first) __attribute__((always_inline)) {
    constexpr int kColumns = decltype(size)::value;
    const std::int64_t count = std::min<std::int64_t>(kColumns, floats - first);
    std::uint32_t bits[kColumns];
    if constexpr (kStochastic) dice.Throw(column + first, bits);
    if (count == kColumns) return body(size, first, count, from + first, bits);
    float values[kColumns] = {};
    std::memcpy(values, from + first, static_cast<std::size_t>(count) * sizeof(float));
    body(size, first, count, static_cast<const float*>(values), bits);
  };
  std::int64_t c = 0;
  for (; floats - c > 32; c += 64) chunk(std::integral_constant<int, 64>{}, c);
  for (; c < floats; c += 16) chunk(std::integral_constant<int, 16>{}, c);
}

template <int W, typename Short>
TIERSTORE_INLINE typename VecTypes<W>::Float LoadShorts(const void* from) {
  typename ShortTypes<W>::Shorts shorts;
  Load(shorts, from);
  return Short::template From<W>(shorts);
}

// Writes `floats` numbers as 16 bits each, by Short::To.
template <int W, bool kStochastic, typename Short>
TIERSTORE_INLINE void ToShort(const float* from, std::int64_t floats, std::int64_t column, const Dice& dice,
                              std::uint8_t* to) {
  ForChunks<kStochastic>(
      from, floats, column, dice,
      [&](auto size, std::int64_t first, std::int64_t count, const float* values, const std::uint32_t* bits)
          __attribute__((always_inline)) {
            constexpr int kColumns = decltype(size)::value;
            std::uint16_t room[kColumns];
            void* const out = count == kColumns ? static_cast<void*>(to + 2 * first) : room;
            for (int i = 0; i < kColumns; i += W) {
              typename VecTypes<W>::Float value;
              typename ShortTypes<W>::Words thrown = {};
              Load(value, values + i);
              if constexpr (kStochastic) Load(thrown, bits + i);
              Store(static_cast<std::uint16_t*>(out) + i, Short::template To<kStochastic, W>(value, thrown));
            }
            if (count < kColumns) std::memcpy(to + 2 * first, room, static_cast<std::size_t>(2 * count));
          });
}

// Writes `floats` numbers of 16 bits each as float32, by Short::From.
template <int W, typename Short>
TIERSTORE_INLINE void FromShort(const std::uint8_t* from, std::int64_t floats, float* to) {
  std::int64_t c = 0;
  for (; c + W <= floats; c += W) Store(to + c, LoadShorts<W, Short>(from + 2 * c));
  for (; c < floats; ++c) to[c] = LoadShorts<1, Short>(from + 2 * c);
}

// Returns a buffer of this thread, which is valid until the thread calls Scratch again.
inline float* Scratch(std::int64_t floats) {
  thread_local std::vector<float> buffer;
  if (static_cast<std::int64_t>(buffer.size()) < floats) buffer.resize(static_cast<std::size_t>(floats));
  return buffer.data();
}

}  // namespace tierstore
