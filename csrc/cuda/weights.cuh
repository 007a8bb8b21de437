// The weights of rows, as kernels read and write them: float32, or 16 bits that are read as float32.
// kernels/narrow.h says how numbers are rounded to 16 bits, kernels/update.h by which random bits.
#pragma once

#include "cuda/device.cuh"
#include "kernels/philox.h"

namespace tierstore::cuda {

enum WeightType : int { kFloat32 = 0, kBfloat16 = 1, kHalf = 2 };  // kernels/rows.h

// Where the state of a row begins that has it behind its weights, in floats.
TIERSTORE_DEVICE constexpr int64_t StateBegin(int type, int64_t dim) {
  return type == kFloat32 ? dim : (dim + 1) / 2;
}

TIERSTORE_DEVICE float FromShort(int type, uint16_t bits) {
  if (type == kBfloat16) return FloatOf(static_cast<uint32_t>(bits) << 16);
#if defined(__CUDACC__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
#else
  const uint32_t magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u << 13) return FloatOf(magnitude | sign | 0x7f800000u);
  const bool is_small = magnitude < 0x400u << 13;  // subnormal: with the exponent of 2^-14, 2^-14 too large
  const float small = FloatOf(magnitude + (113u << 23)) - 0x1p-14f;
  return FloatOf((is_small ? BitsOf(small) : magnitude + (112u << 23)) | sign);
#endif
}

// How the weights of one row are rounded: to the nearest number, or up at random.
struct Dice {
  bool are_thrown;
  uint64_t id, seed;
  uint32_t last;    // word of the counter
  uint32_t column;  // the row's first one in a wider table

  // What is added to `bits` before the lowest `cut` of them are cut off.
  TIERSTORE_DEVICE uint32_t Rounding(uint32_t bits, int cut, uint32_t thrown) const {
    const uint32_t below = (1u << cut) - 1;
    return are_thrown ? thrown & below : (bits >> cut & 1u) + (below >> 1);
  }

  // The 16 random bits of kColumns columns from `first` on.
  template <int kColumns>
  TIERSTORE_DEVICE void Throw(uint32_t first, uint32_t (&out)[kColumns]) const {
    const uint32_t begin = column + first;
    for (uint32_t eight = begin / 8; eight <= (begin + kColumns - 1) / 8; ++eight) {
      uint32_t words[4][1];
      Philox<1>(static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), eight, seed, words, last);
      TIERSTORE_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const uint32_t in_eight = begin + static_cast<uint32_t>(j) - 8 * eight;
        if (in_eight >= 8) continue;
        const uint32_t low = in_eight % 2 != 0 ? words[1][0] : words[0][0];
        const uint32_t high = in_eight % 2 != 0 ? words[3][0] : words[2][0];
        const uint32_t word = in_eight % 4 >= 2 ? high : low;
        out[j] = in_eight < 4 ? word & 0xffffu : word >> 16;
      }
    }
  }
};

TIERSTORE_DEVICE uint32_t ToBfloat16(uint32_t magnitude, const Dice& dice, uint32_t thrown) {
  if (magnitude >= 0x7f800000u) return magnitude >> 16 | (magnitude > 0x7f800000u ? 0x40u : 0u);
  const uint32_t rounded = (magnitude + dice.Rounding(magnitude, 16, thrown)) >> 16;
  return rounded < 0x7f7fu ? rounded : 0x7f7fu;
}

TIERSTORE_DEVICE uint32_t ToHalf(uint32_t magnitude, const Dice& dice, uint32_t thrown) {
  if (magnitude >= 0x7f800000u)
    return magnitude > 0x7f800000u ? (magnitude >> 13 & 0x3ffu) | 0x7e00u : 0x7c00u;
  uint32_t rounded;
  if (magnitude < 0x38800000u) {
    // Multiples of 2^-24: 16 bits below that, and a last bit that tells of further ones.
    const float scaled = FloatOf(magnitude) * 0x1p40f;
    const int32_t whole = static_cast<int32_t>(scaled);
    const uint32_t fixed = static_cast<uint32_t>(whole) | (static_cast<float>(whole) < scaled ? 1u : 0u);
    rounded = (fixed + dice.Rounding(fixed, 16, thrown)) >> 16;
  } else {
    rounded = ((magnitude + dice.Rounding(magnitude, 13, thrown)) >> 13) - (112u << 10);
  }
  return rounded < 0x7bffu ? rounded : 0x7bffu;
}

TIERSTORE_DEVICE uint16_t ToShort(int type, float value, const Dice& dice, uint32_t thrown) {
  const uint32_t bits = BitsOf(value), magnitude = bits & 0x7fffffffu;
  const uint32_t rounded =
      type == kBfloat16 ? ToBfloat16(magnitude, dice, thrown) : ToHalf(magnitude, dice, thrown);
  return static_cast<uint16_t>(rounded | (bits >> 16 & 0x8000u));
}

// The dice of the row of unique row u in an update.
TIERSTORE_DEVICE Dice DiceOf(const RoundingArgs& a, int64_t u, int64_t step) {
  if (a.keys == nullptr) return {};
  const uint64_t key = Load(a.keys + u), table = key >> 48;
  return {true, key & ((uint64_t{1} << 48) - 1), Load(a.seeds + table), static_cast<uint32_t>(step) * 2,
          a.columns != nullptr ? static_cast<uint32_t>(Load(a.columns + table)) : 0};
}

// Weights of neighbouring columns, which one access moves.
template <int kVec, int kType>
struct alignas(2 * kVec) NarrowWord {
  uint16_t v[kVec];
};
template <int kVec>
struct NarrowWord<kVec, kFloat32> : Word<kVec> {};

// A row of kDim weights of one type, and the words of it that a thread of its group has.
template <int kDim, int kVec, int kType>
struct TypedRow {
  using G = Group<kDim, kVec>;
  using Columns = typename G::Columns;
  static constexpr int kState = static_cast<int>(StateBegin(kType, kDim));
  static constexpr int kStateWord = kState % kVec == 0 ? kVec : 2;  // behind weights of 16 bits
  using Narrow = NarrowWord<kVec, kType>;

  // A thread's weights as memory has them. To widen one is to wait for it, so that comes after all reads.
  struct Packed {
    Narrow w[G::kWords];
  };

  template <Hint kHint = kCached>
  static TIERSTORE_DEVICE Packed Read(const float* row) {
    Packed packed = {};
    TIERSTORE_UNROLL
    for (int i = 0; i < G::kWords; ++i) {
      if (G::Has(i))
        packed.w[i] = Load<kHint>(reinterpret_cast<const Narrow*>(row) + i * G::kLanes + G::lane());
    }
    return packed;
  }
  static TIERSTORE_DEVICE Columns Widened(const Packed& packed) {
    Columns columns;
    TIERSTORE_UNROLL
    for (int i = 0; i < G::kWords; ++i) {
      TIERSTORE_UNROLL
      for (int j = 0; j < kVec; ++j) {
        if constexpr (kType == kFloat32) {
          columns.w[i].v[j] = packed.w[i].v[j];
        } else {
          columns.w[i].v[j] = FromShort(kType, packed.w[i].v[j]);
        }
      }
    }
    return columns;
  }
  template <Hint kHint = kCached>
  static TIERSTORE_DEVICE void SetWeights(float* row, const Columns& columns, const Dice& dice) {
    if constexpr (kType == kFloat32) {
      G::template Write<kVec, kHint>(row, columns);
    } else {
      TIERSTORE_UNROLL
      for (int i = 0; i < G::kWords; ++i) {
        if (!G::Has(i)) continue;
        uint32_t thrown[kVec] = {};
        if (dice.are_thrown) dice.Throw(static_cast<uint32_t>((i * G::kLanes + G::lane()) * kVec), thrown);
        Narrow word;
        TIERSTORE_UNROLL
        for (int j = 0; j < kVec; ++j) word.v[j] = ToShort(kType, columns.w[i].v[j], dice, thrown[j]);
        Store<kHint>(reinterpret_cast<Narrow*>(row) + i * G::kLanes + G::lane(), word);
      }
    }
  }

  // What the state of a row has for each column, from `at` on.
  static TIERSTORE_DEVICE Columns State(const float* at) { return G::template Read<kStateWord>(at); }
  static TIERSTORE_DEVICE void SetState(float* at, const Columns& state) {
    G::template Write<kStateWord>(at, state);
  }
};

}  // namespace tierstore::cuda
