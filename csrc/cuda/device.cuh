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

// How an access uses the caches.
enum Hint {
  kCached,
  // Read or written once: the near cache keeps nothing, and the far one lets what was written go first.
  kStreamed,
  // Read once, and written by no kernel meanwhile. The bytes are read past the coherence of caches, so two
  // things must hold: what wrote them has ended before this kernel began, and nothing writes them until it
  // has ended. So it is with gradients, and with rows that are looked up: a kernel in another stream that
  // fills their slots, or moves them, is ordered before or after the lookup by an event (cuda/streams.py),
  // and what it writes beside are rows that this kernel does not read.
  kReadOnly,
};

#if defined(__CUDACC__)
// Bytes of an access by themselves.
template <int kBytes>
struct Bits;
template <>
struct Bits<16> {
  using T = float4;
};
template <>
struct Bits<8> {
  using T = float2;
};
template <>
struct Bits<4> {
  using T = float;
};
template <>
struct Bits<2> {
  using T = unsigned short;
};

// The compiler does not know of what is read here; a thread that writes the same bytes needs their value.
#define TIERSTORE_LOAD(of)                                                            \
  TIERSTORE_DEVICE void LoadBits(const float4* from, float4* to) {                    \
    asm volatile(of ".v4.f32 {%0,%1,%2,%3}, [%4];"                                    \
                 : "=f"(to->x), "=f"(to->y), "=f"(to->z), "=f"(to->w)                 \
                 : "l"(from));                                                        \
  }                                                                                   \
  TIERSTORE_DEVICE void LoadBits(const float2* from, float2* to) {                    \
    asm volatile(of ".v2.f32 {%0,%1}, [%2];" : "=f"(to->x), "=f"(to->y) : "l"(from)); \
  }                                                                                   \
  TIERSTORE_DEVICE void LoadBits(const float* from, float* to) {                      \
    asm volatile(of ".f32 %0, [%1];" : "=f"(*to) : "l"(from));                        \
  }                                                                                   \
  TIERSTORE_DEVICE void LoadBits(const unsigned short* from, unsigned short* to) {    \
    asm volatile(of ".u16 %0, [%1];" : "=h"(*to) : "l"(from));                        \
  }
namespace streamed {
TIERSTORE_LOAD("ld.global.L1::no_allocate")
}
namespace read_only {
TIERSTORE_LOAD("ld.global.nc.L1::no_allocate")
}
#undef TIERSTORE_LOAD

template <Hint kHint = kCached, typename T>
TIERSTORE_DEVICE T Load(const T* from) {
  if constexpr (kHint == kCached) {
    return *from;
  } else {
    using B = typename Bits<sizeof(T)>::T;
    union {
      B bits;
      T value;
    } read;
    if constexpr (kHint == kStreamed) {
      streamed::LoadBits(reinterpret_cast<const B*>(from), &read.bits);
    } else {
      read_only::LoadBits(reinterpret_cast<const B*>(from), &read.bits);
    }
    return read.value;
  }
}
template <Hint kHint = kCached, typename T>
TIERSTORE_DEVICE void Store(T* to, const T& value) {
  if constexpr (kHint == kCached) {
    *to = value;
  } else {
    using B = typename Bits<sizeof(T)>::T;
    union {
      T value;
      B bits;
    } written = {value};
    __stcs(reinterpret_cast<B*>(to), written.bits);
  }
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
TIERSTORE_DEVICE unsigned Ballot(bool here) { return __ballot_sync(0xffffffffu, here); }
TIERSTORE_DEVICE int CountBits(unsigned bits) { return __popc(bits); }
TIERSTORE_DEVICE int FirstBit(unsigned bits) { return __ffs(static_cast<int>(bits)) - 1; }
TIERSTORE_DEVICE int LastBit(unsigned bits) { return 31 - __clz(static_cast<int>(bits)); }
#else
template <Hint kHint = kCached, typename T>
T Load(const T* from) {
  emulator::Access(from, sizeof(T), alignof(T), false);
  return *from;
}
template <Hint kHint = kCached, typename T>
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
// The lanes in which `here` holds. All threads of the warp must call it.
inline unsigned Ballot(bool here) { return emulator::Ballot(here); }
inline int CountBits(unsigned bits) { return std::popcount(bits); }
inline int FirstBit(unsigned bits) { return std::countr_zero(bits); }
inline int LastBit(unsigned bits) { return 31 - std::countl_zero(bits); }
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

  // How many rows a thread can read at once, at most `most`, without having too many floats.
  static TIERSTORE_DEVICE constexpr int AtOnce(int most, int columns_of_row = 1) {
    return most > 1 && most * columns_of_row * kWords * kVec > 40 ? AtOnce(most / 2, columns_of_row) : most;
  }

  // This thread's words of something with a float per column; zero behind the last column.
  struct Columns {
    W w[kWords];
  };

  static TIERSTORE_DEVICE int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  static TIERSTORE_DEVICE bool Has(int i) { return i * kLanes + lane() < kWordsOfRow; }

  // An access to memory moves kPart floats of a word: fewer than a word's where these are not aligned.
  template <int kPart = kVec, Hint kHint = kCached>
  static TIERSTORE_DEVICE Columns Read(const float* from) {
    Columns columns = {};
    TIERSTORE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if (!Has(i)) continue;
      if constexpr (kPart == kVec) {
        columns.w[i] = Load<kHint>(reinterpret_cast<const W*>(from) + i * kLanes + lane());
      } else {
        const float* const at = from + (i * kLanes + lane()) * kVec;
        TIERSTORE_UNROLL
        for (int part = 0; part < kVec; part += kPart) {
          const Word<kPart> word = Load<kHint>(reinterpret_cast<const Word<kPart>*>(at + part));
          TIERSTORE_UNROLL
          for (int j = 0; j < kPart; ++j) columns.w[i].v[part + j] = word.v[j];
        }
      }
    }
    return columns;
  }
  template <int kPart = kVec, Hint kHint = kCached>
  static TIERSTORE_DEVICE void Write(float* to, const Columns& columns) {
    TIERSTORE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if (!Has(i)) continue;
      if constexpr (kPart == kVec) {
        Store<kHint>(reinterpret_cast<W*>(to) + i * kLanes + lane(), columns.w[i]);
      } else {
        float* const at = to + (i * kLanes + lane()) * kVec;
        TIERSTORE_UNROLL
        for (int part = 0; part < kVec; part += kPart) {
          Word<kPart> word;
          TIERSTORE_UNROLL
          for (int j = 0; j < kPart; ++j) word.v[j] = columns.w[i].v[part + j];
          Store<kHint>(reinterpret_cast<Word<kPart>*>(at + part), word);
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
    float sums[kVec] = {};
    TIERSTORE_UNROLL
    for (int c = 0; c < kDim; c += 16) {
      const int word = c / kVec, from = first() + word % kLanes + lane() % kLeast;
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

  // The first of the group's threads, in the warp.
  static TIERSTORE_DEVICE int first() { return static_cast<int>(threadIdx.x % kWarp) - lane(); }

  // The value of the group's first thread. All threads of the warp must call it.
  static TIERSTORE_DEVICE float FromFirst(float value) { return ShuffleFrom(value, first()); }

  // Whether `here` holds in any thread of the group. All threads of the warp must call it.
  static TIERSTORE_DEVICE bool Any(bool here) {
    int any = here ? 1 : 0;
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) any |= ShuffleXor(any, lanes);
    return any != 0;
  }
};

// The largest value in the warp. All of its threads must call it.
template <typename T>
TIERSTORE_DEVICE T MostOfWarp(T value) {
  TIERSTORE_UNROLL
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const T other = ShuffleXor(value, lanes);
    value = other > value ? other : value;
  }
  return value;
}

// Calls body(item, inside) in the threads of a group for every item below n, and with inside = false so often
// that all threads of a warp make the same calls. With kItems, for every kItems items of a group, which are
// kWarp / kLanes apart, by the first of them.
template <int kLanes, int kItems = 1, typename Body>
TIERSTORE_DEVICE void ForItems(int64_t n, const Body& body) {
  constexpr int kOfWarp = kWarp / kLanes * kItems;
  const int64_t warps_of_block = blockDim.x / kWarp;
  const int64_t step = gridDim.x * warps_of_block * kOfWarp;
  for (int64_t first = (blockIdx.x * warps_of_block + threadIdx.x / kWarp) * kOfWarp; first < n;
       first += step) {
    const int64_t item = first + threadIdx.x % kWarp / kLanes;
    body(item, item < n);
  }
}

}  // namespace tierstore::cuda
