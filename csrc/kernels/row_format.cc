#include "kernels/row_format.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/float_mode.h"
#include "common/key.h"
#include "kernels/short_rows.h"
#include "kernels/vec.h"

namespace tierstore {
namespace {

constexpr int kLanes = 16;
constexpr std::int64_t kPieceBytes = 64 << 10;

// Returns a hash of the row's bits, which any changed column changes; the lanes are the same on every
// instruction set.
TIERSTORE_INLINE std::uint32_t HashRow(const float* row, std::int64_t floats) {
  constexpr std::uint32_t kOdd1 = 0x9E3779B1, kOdd2 = 0x85EBCA77, kOdd3 = 0xC2B2AE3D;
  std::uint32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<std::uint32_t>(i + 1) * kOdd3;
  const auto add = [&](const std::uint32_t* bits) __attribute__((always_inline)) {
    for (int i = 0; i < kLanes; ++i) {
      const std::uint32_t mixed = (lanes[i] ^ bits[i]) * kOdd1;
      lanes[i] = mixed ^ mixed >> 15;
    }
  };
  std::uint32_t bits[kLanes];
  std::int64_t c = 0;
  for (; c + kLanes <= floats; c += kLanes) std::memcpy(bits, row + c, sizeof bits), add(bits);
  if (c < floats) {
    std::memset(bits, 0, sizeof bits);
    std::memcpy(bits, row + c, static_cast<std::size_t>(floats - c) * sizeof(float));
    add(bits);
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      const std::uint32_t mixed = (lanes[i] ^ lanes[i + half] >> 7) * kOdd2 + lanes[i + half];
      lanes[i] = mixed ^ mixed >> 13;
    }
  }
  return lanes[0];
}

// Writes one byte per weight, step and offset. Returns whether the row has a step.
template <bool kStochastic>
TIERSTORE_INLINE bool ToBytes(const float* from, const RowFormat& format, const Dice& dice,
                              std::uint8_t* to) {
  const Grid grid = GridOf(from, format.dim);
  std::memcpy(to + format.rest(), &grid.step, sizeof(float));
  std::memcpy(to + format.rest() + 4, &grid.offset, sizeof(float));
  if (grid.step == 0.0f || !grid.fits) {
    std::memset(to, 0, static_cast<std::size_t>(format.dim));
    return grid.fits;
  }
  ForChunks<kStochastic>(from, format.dim, 0, dice,
                         [&](auto size, std::int64_t first, std::int64_t count, const float* values,
                             const std::uint32_t* bits) __attribute__((always_inline)) {
                           constexpr int kColumns = decltype(size)::value;
                           std::uint8_t out[kColumns];
                           for (int i = 0; i < kColumns; ++i)
                             out[i] = Quantise<kStochastic>(grid, values[i], kStochastic ? bits[i] : 0);
                           std::memcpy(to + first, out, static_cast<std::size_t>(count));
                         });
  return true;
}

struct EncodeKernel {
  struct Args {
    Rows rows;
    const std::int32_t* slots;
    const std::uint64_t* keys;
    std::int64_t n;
    const RowFormat* format;
    TableSeeds tables;
    std::uint8_t* to;
    std::atomic<std::int64_t>* lost;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    args.format->stochastic ? RunRows<W, true>(args, begin, end) : RunRows<W, false>(args, begin, end);
  }

  template <int W, bool kStochastic>
  TIERSTORE_INLINE static void RunRows(const Args& args, std::int64_t begin, std::int64_t end) {
    const std::int64_t bytes = args.format->row_bytes(), wide = args.rows.row_bytes;
    const std::int64_t ahead = PrefetchAhead(wide);
    for (std::int64_t i = begin; i < end; ++i) {
      if (args.slots != nullptr && i + ahead < args.n)
        Prefetch<false>(args.rows.At(args.slots[i + ahead]), wide);
      const float* from =
          reinterpret_cast<const float*>(args.rows.base + (args.slots != nullptr ? args.slots[i] : i) * wide);
      Dice dice;
      if constexpr (kStochastic) {
        dice.id = KeyId(args.keys[i]);
        dice.seed = args.tables.seeds[KeyTable(args.keys[i])];
        dice.last = HashRow(from, args.format->wide_floats()) | 1;
      }
      if (!Encode<W, kStochastic>(from, *args.format, dice, args.to + i * bytes)) NoteLost(args.lost, i);
    }
  }

  template <int W, bool kStochastic>
  TIERSTORE_INLINE static bool Encode(const float* from, const RowFormat& format, const Dice& dice,
                                      std::uint8_t* to) {
    const std::int64_t dim = format.dim, state_bytes = (format.short_state ? 2 : 4) * format.state_floats;
    bool fits = true;
    switch (format.weights) {
      case WeightType::kFloat32:
        std::memcpy(to, from, static_cast<std::size_t>(4 * dim));
        break;
      case WeightType::kBfloat16:
        ToShort<W, kStochastic, Bfloat16>(from, dim, 0, dice, to);
        break;
      case WeightType::kHalf:
        ToShort<W, kStochastic, Half>(from, dim, 0, dice, to);
        break;
      case WeightType::kInt8:
        fits = ToBytes<kStochastic>(from, format, dice, to);
        break;
    }
    std::memset(to + format.weight_bytes(), 0,
                static_cast<std::size_t>(format.rest() - format.weight_bytes()));
    if (format.short_state) {
      ToShort<W, kStochastic, Bfloat16>(from + dim, format.state_floats, (dim + 7) / 8 * 8, dice,
                                        to + format.state());
    } else {
      std::memcpy(to + format.state(), from + dim, static_cast<std::size_t>(state_bytes));
    }
    const std::int64_t end = format.state() + state_bytes;
    std::memset(to + end, 0, static_cast<std::size_t>(format.row_bytes() - end));
    return fits;
  }

  static void NoteLost(std::atomic<std::int64_t>* lost, std::int64_t i) {
    std::int64_t before = lost->load();
    while (i < before && !lost->compare_exchange_weak(before, i)) {
    }
  }
};

TIERSTORE_INLINE void FromBytes(const std::uint8_t* from, const RowFormat& format, float* to) {
  float step, offset;
  std::memcpy(&step, from + format.rest(), sizeof step);
  std::memcpy(&offset, from + format.rest() + 4, sizeof offset);
  for (std::int64_t c = 0; c < format.dim; ++c)
    to[c] = static_cast<float>(static_cast<std::int32_t>(from[c])) * step + offset;
}

struct DecodeKernel {
  struct Args {
    Rows rows;
    const std::int32_t* slots;
    const std::int32_t* source;
    std::int64_t n;
    const RowFormat* format;
    const std::uint8_t* from;

    const std::uint8_t* Encoded(std::int64_t i) const {
      return from + (source != nullptr ? source[i] : i) * format->row_bytes();
    }
    float* Wide(std::int64_t i) const {
      return reinterpret_cast<float*>(rows.base + (slots != nullptr ? slots[i] : i) * rows.row_bytes);
    }
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const std::int64_t wide = args.rows.row_bytes, bytes = args.format->row_bytes();
    const std::int64_t ahead = PrefetchAhead(wide);
    for (std::int64_t i = begin; i < end; ++i) {
      if (i + ahead < args.n) {
        Prefetch<true>(args.Wide(i + ahead), wide);
        if (args.source != nullptr) Prefetch<false>(args.Encoded(i + ahead), bytes);
      }
      Decode<W>(*args.format, args.Encoded(i), args.Wide(i), wide / 4);
    }
  }

  template <int W>
  TIERSTORE_INLINE static void Decode(const RowFormat& format, const std::uint8_t* from, float* to,
                                      std::int64_t floats) {
    switch (format.weights) {
      case WeightType::kFloat32:
        std::memcpy(to, from, static_cast<std::size_t>(4 * format.dim));
        break;
      case WeightType::kBfloat16:
        FromShort<W, Bfloat16>(from, format.dim, to);
        break;
      case WeightType::kHalf:
        FromShort<W, Half>(from, format.dim, to);
        break;
      case WeightType::kInt8:
        FromBytes(from, format, to);
        break;
    }
    float* const state = to + format.dim;
    if (format.short_state) {
      FromShort<W, Bfloat16>(from + format.state(), format.state_floats, state);
    } else {
      std::memcpy(state, from + format.state(), static_cast<std::size_t>(4 * format.state_floats));
    }
    std::fill(state + format.state_floats, to + floats, 0.0f);
  }
};

std::int64_t Grain(std::int64_t row_bytes) { return std::max<std::int64_t>(1, kPieceBytes / row_bytes); }

}  // namespace

std::int64_t EncodeRows(Rows rows, const std::int32_t* slots, const std::uint64_t* keys, std::int64_t n,
                        const RowFormat& format, const TableSeeds& tables, std::uint8_t* to) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::atomic<std::int64_t> lost{kNone};
  // Any thread may move a row, whatever the thread's mode is.
  const ScopedFloatMode mode(DefaultFloatMode());
  RunKernel<EncodeKernel>({rows, slots, keys, n, &format, tables, to, &lost}, 0, n, Grain(rows.row_bytes));
  return lost == kNone ? -1 : lost.load();
}

void DecodeRows(Rows rows, const std::int32_t* slots, const std::int32_t* source, std::int64_t n,
                const RowFormat& format, const std::uint8_t* from) {
  const ScopedFloatMode mode(DefaultFloatMode());
  RunKernel<DecodeKernel>({rows, slots, source, n, &format, from}, 0, n, Grain(rows.row_bytes));
}

}  // namespace tierstore
