// What device code needs of its compiler: nvcc and NVRTC compile it for the GPU, g++ for the emulator
// (cuda/emulate.h). Device code reads and writes memory through Load and Store only, which the emulator
// checks.
//
// Results have the bits of the CPU kernels (csrc/kernels): the compiler must not contract a multiplication
// and an addition (--fmad=false, -ffp-contract=off), division and roots are rounded as IEEE 754 says, sums
// over positions are in the order of positions, and sums over columns have the 16 lanes of kernels/vec.h.
#pragma once

#include "cuda/args.h"

#if defined(__CUDACC__)
#define TIERSTORE_DEVICE __device__ __forceinline__
#define TIERSTORE_UNROLL _Pragma("unroll")
#else
#include "cuda/emulate.h"
#define TIERSTORE_DEVICE inline
#define TIERSTORE_UNROLL
#endif

namespace tierstore::cuda {

// Floats of neighbouring columns, which one access to memory moves.
template <int V>
struct alignas(4 * V) Word {
  float v[V];
};

#if defined(__CUDACC__)
template <typename T>
TIERSTORE_DEVICE T Load(const T* from) {
  return *from;
}
template <typename T>
TIERSTORE_DEVICE void Store(T* to, const T& value) {
  *to = value;
}
TIERSTORE_DEVICE float Sqrt(float x) { return __fsqrt_rn(x); }
TIERSTORE_DEVICE unsigned BitsOf(float x) { return __float_as_uint(x); }
TIERSTORE_DEVICE float FloatOf(unsigned bits) { return __uint_as_float(bits); }
template <typename T>
TIERSTORE_DEVICE T ShuffleXor(T value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}
template <typename T>
TIERSTORE_DEVICE T ShuffleFrom(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
#else
template <typename T>
T Load(const T* from) {
  emulator::Access(from, sizeof(T), alignof(T), false);
  return *from;
}
template <typename T>
void Store(T* to, const T& value) {
  emulator::Access(to, sizeof(T), alignof(T), true);
  *to = value;
}
inline float Sqrt(float x) { return std::sqrt(x); }
inline unsigned BitsOf(float x) { return std::bit_cast<unsigned>(x); }
inline float FloatOf(unsigned bits) { return std::bit_cast<float>(bits); }
template <typename T>
T ShuffleXor(T value, int lanes) {
  return emulator::Shuffle(value, static_cast<int>(threadIdx.x % kWarp) ^ lanes);
}
template <typename T>
T ShuffleFrom(T value, int lane) {
  return emulator::Shuffle(value, lane);
}
#endif

TIERSTORE_DEVICE bool IsFinite(float x) { return (BitsOf(x) & 0x7f800000u) != 0x7f800000u; }

// Some threads of a warp share a row: thread `lane` has its words lane, lane + kLanes ... A group has at
// least the threads whose words are the 16 lanes of a sum over columns.
template <int kDim, int kVec>
struct Group {
  static_assert(kDim % kVec == 0 && (kVec == 1 || kVec == 4));
  static constexpr int kWordsOfRow = kDim / kVec;
  static constexpr int kLeast = 16 / kVec;
  static constexpr int LanesFor(int words, int lanes) {
    return lanes >= words || lanes == kWarp ? lanes : LanesFor(words, 2 * lanes);
  }
  static constexpr int kLanes = LanesFor(kWordsOfRow, kLeast);
  static constexpr int kWords = (kWordsOfRow + kLanes - 1) / kLanes;  // of a thread
  using W = Word<kVec>;

  // This thread's words of something with a float per column; zero behind the last column.
  struct Columns {
    W w[kWords];
  };

  static TIERSTORE_DEVICE int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  static TIERSTORE_DEVICE bool Has(int i) { return i * kLanes + lane() < kWordsOfRow; }

  // An access to memory moves kPart floats of a word: fewer than a word's where these are not aligned.
  template <int kPart = kVec>
  static TIERSTORE_DEVICE Columns Read(const float* from) {
    Columns columns = {};
    TIERSTORE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if (!Has(i)) continue;
      if constexpr (kPart == kVec) {
        columns.w[i] = Load(reinterpret_cast<const W*>(from) + i * kLanes + lane());
      } else {
        const float* const at = from + (i * kLanes + lane()) * kVec;
        TIERSTORE_UNROLL
        for (int part = 0; part < kVec; part += kPart) {
          const Word<kPart> word = Load(reinterpret_cast<const Word<kPart>*>(at + part));
          TIERSTORE_UNROLL
          for (int j = 0; j < kPart; ++j) columns.w[i].v[part + j] = word.v[j];
        }
      }
    }
    return columns;
  }
  template <int kPart = kVec>
  static TIERSTORE_DEVICE void Write(float* to, const Columns& columns) {
    TIERSTORE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if (!Has(i)) continue;
      if constexpr (kPart == kVec) {
        Store(reinterpret_cast<W*>(to) + i * kLanes + lane(), columns.w[i]);
      } else {
        float* const at = to + (i * kLanes + lane()) * kVec;
        TIERSTORE_UNROLL
        for (int part = 0; part < kVec; part += kPart) {
          Word<kPart> word;
          TIERSTORE_UNROLL
          for (int j = 0; j < kPart; ++j) word.v[j] = columns.w[i].v[part + j];
          Store(reinterpret_cast<Word<kPart>*>(at + part), word);
        }
      }
    }
  }

  // Sets what is behind the last column to zero again.
  static TIERSTORE_DEVICE void ClearRest(Columns& columns) {
    TIERSTORE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if (!Has(i)) columns.w[i] = W{};
    }
  }

  // Calls body(float&...) for each column that this thread has, and for those behind the last column.
  template <typename Body, typename... Of>
  static TIERSTORE_DEVICE void ForEach(const Body& body, Of&... of) {
    TIERSTORE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      TIERSTORE_UNROLL
      for (int j = 0; j < kVec; ++j) body(of.w[i].v[j]...);
    }
  }

  // The sum over columns of x * y, the same in every thread of the group. All threads of the warp must call
  // it. Lane i of kernels/vec.h is the sum, in the order of columns, of columns i, i + 16 ...; then lane i is
  // added to lane i - 8, i - 4, i - 2 and i - 1 in turn.
  static TIERSTORE_DEVICE float Dot(const Columns& x, const Columns& y) {
    Columns product = {};
    ForEach([](float& p, const float& a, const float& b) { p = a * b; }, product, x, y);
    const int first = static_cast<int>(threadIdx.x % kWarp) - lane();
    float sums[kVec] = {};
    TIERSTORE_UNROLL
    for (int c = 0; c < kDim; c += 16) {
      const int word = c / kVec, from = first + word % kLanes + lane() % kLeast;
      TIERSTORE_UNROLL
      for (int j = 0; j < kVec; ++j) sums[j] += ShuffleFrom(product.w[word / kLanes].v[j], from);
    }
    TIERSTORE_UNROLL
    for (int apart = 8; apart >= 4; apart /= 2) {
      TIERSTORE_UNROLL
      for (int j = 0; j < kVec; ++j) sums[j] += ShuffleXor(sums[j], apart / kVec);
    }
    if constexpr (kVec == 4) {
      return (sums[0] + sums[2]) + (sums[1] + sums[3]);
    } else {
      sums[0] += ShuffleXor(sums[0], 2);
      return sums[0] + ShuffleXor(sums[0], 1);
    }
  }

  // The value of the group's first thread. All threads of the warp must call it.
  static TIERSTORE_DEVICE float FromFirst(float value) {
    return ShuffleFrom(value, static_cast<int>(threadIdx.x % kWarp) - lane());
  }

  // Whether `here` holds in any thread of the group. All threads of the warp must call it.
  static TIERSTORE_DEVICE bool Any(bool here) {
    int any = here ? 1 : 0;
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) any |= ShuffleXor(any, lanes);
    return any != 0;
  }
};

// Calls body(item, inside) in the threads of a group for every item below n, and with inside = false so often
// that all threads of a warp make the same calls.
template <int kLanes, typename Body>
TIERSTORE_DEVICE void ForItems(int64_t n, const Body& body) {
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (blockDim.x / kLanes);
  const int64_t of_block = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes);
  const int64_t of_warp = threadIdx.x / kWarp * (kWarp / kLanes);
  for (int64_t first = of_block + of_warp; first < n; first += groups) {
    const int64_t item = first + threadIdx.x % kWarp / kLanes;
    body(item, item < n);
  }
}

}  // namespace tierstore::cuda
