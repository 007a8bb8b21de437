// A stable radix sort of 32-bit keys with their positions, and sums of many numbers.
//
// A warp takes a tile of keys that follow one another. A pass counts the keys of each tile by their digit,
// adds up the counts before each tile, and places the keys. Each thread has the counters of four digits in
// registers: ballots give it, for 32 keys at a time, how many have each, and to every key the keys before it
// that have its digit. So no thread shares memory with another, and no order of theirs changes the result.
#pragma once

#include "cuda/device.cuh"

namespace tierstore::cuda {

constexpr int64_t kTile = 512;
constexpr int kAtOnce = 4;  // groups of 32 keys that a warp reads before it uses one
constexpr int kDigitBits = 7, kOwnDigits = (1 << kDigitBits) / kWarp;

TIERSTORE_DEVICE int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }
TIERSTORE_DEVICE unsigned LanesBefore() { return (1u << Lane()) - 1; }

// Calls body(tile, begin, end) for every tile of n items, in all threads of the warp that takes it.
template <typename Body>
TIERSTORE_DEVICE void ForTiles(int64_t n, const Body& body) {
  const int64_t warps_of_block = blockDim.x / kWarp, step = gridDim.x * warps_of_block;
  for (int64_t tile = blockIdx.x * warps_of_block + threadIdx.x / kWarp; tile * kTile < n; tile += step) {
    const int64_t begin = tile * kTile;
    body(tile, begin, begin + kTile < n ? begin + kTile : n);
  }
}

// The threads of a group of items from `at` on that have one below `end`.
TIERSTORE_DEVICE unsigned LanesBelow(int64_t at, int64_t end) {
  return end - at >= kWarp ? ~0u : (1u << (end - at)) - 1;
}

// Sum of the values in the lanes before this one, and in it. All threads of the warp must call it.
TIERSTORE_DEVICE int32_t SumUpTo(int32_t value) {
  TIERSTORE_UNROLL
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const int32_t other = ShuffleFrom(value, Lane() >= lanes ? Lane() - lanes : Lane());
    value += Lane() >= lanes ? other : 0;
  }
  return value;
}

// The digits of 32 keys, one in each thread, of which those of the lanes `here` count.
class DigitsOfWarp {
 public:
  TIERSTORE_DEVICE DigitsOfWarp(uint32_t digit, unsigned here) : digit_(digit), here_(here) {
    TIERSTORE_UNROLL
    for (int bit = 0; bit < kDigitBits; ++bit) with_[bit] = Ballot((digit >> bit & 1) != 0);
  }
  // The lanes with this thread's digit.
  TIERSTORE_DEVICE unsigned Peers() const {
    unsigned lanes = here_;
    TIERSTORE_UNROLL
    for (int bit = 0; bit < kDigitBits; ++bit) lanes &= Of(bit, digit_ >> bit);
    return lanes;
  }
  // Adds the number of lanes with each of this thread's own digits, which are kOwnDigits * Lane() and on.
  TIERSTORE_DEVICE void AddTo(int32_t* counts) const {
    unsigned lanes = here_;
    TIERSTORE_UNROLL
    for (int bit = 2; bit < kDigitBits; ++bit) lanes &= Of(bit, static_cast<uint32_t>(Lane()) >> (bit - 2));
    TIERSTORE_UNROLL
    for (uint32_t own = 0; own < kOwnDigits; ++own)
      counts[own] += CountBits(lanes & Of(0, own) & Of(1, own >> 1));
  }

 private:
  static_assert(kOwnDigits == 4);
  // The lanes whose digits have the lowest bit of `value` there.
  TIERSTORE_DEVICE unsigned Of(int bit, uint32_t value) const { return with_[bit] ^ ((value & 1) - 1); }

  uint32_t digit_;
  unsigned here_;
  unsigned with_[kDigitBits];
};

TIERSTORE_DEVICE uint32_t DigitOf(const SortArgs& a, uint32_t key) {
  return key >> a.shift & ((1u << a.bits) - 1);
}

// Counts the keys of each tile by digit.
TIERSTORE_DEVICE void SortCount(const SortArgs& a) {
  ForTiles(a.n, [&](int64_t tile, int64_t begin, int64_t end) {
    int32_t counts[kOwnDigits] = {};
    for (int64_t at = begin; at < end; at += kAtOnce * kWarp) {
      uint32_t keys[kAtOnce] = {};
      TIERSTORE_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t i = at + k * kWarp + Lane();
        if (i < end) keys[k] = Load(a.keys + i);
      }
      TIERSTORE_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t first = at + k * kWarp;
        if (first < end) DigitsOfWarp(DigitOf(a, keys[k]), LanesBelow(first, end)).AddTo(counts);
      }
    }
    TIERSTORE_UNROLL
    for (int own = 0; own < kOwnDigits; ++own) {
      const int digit = kOwnDigits * Lane() + own;
      if (digit < 1 << a.bits) Store(a.counts + digit * a.stride + tile, counts[own]);
    }
  });
}

// Where the keys of a tile with each of this thread's own digits go.
TIERSTORE_DEVICE void FirstPlaces(const SortArgs& a, int64_t tile, int32_t* places) {
  int32_t of_thread = 0, totals[kOwnDigits] = {};
  TIERSTORE_UNROLL
  for (int own = 0; own < kOwnDigits; ++own) {
    const int digit = kOwnDigits * Lane() + own;
    if (digit < 1 << a.bits) {
      totals[own] = Load(a.totals + digit);
      places[own] = Load(a.counts + digit * a.stride + tile);
    }
    of_thread += totals[own];
  }
  int32_t before = SumUpTo(of_thread) - of_thread;
  TIERSTORE_UNROLL
  for (int own = 0; own < kOwnDigits; ++own) {
    places[own] += before;
    before += totals[own];
  }
}

// Places the keys of each tile behind those with lower digits, and those of earlier tiles with their digit.
TIERSTORE_DEVICE void SortPlace(const SortArgs& a) {
  ForTiles(a.n, [&](int64_t tile, int64_t begin, int64_t end) {
    int32_t places[kOwnDigits] = {};
    FirstPlaces(a, tile, places);
    for (int64_t at = begin; at < end; at += kAtOnce * kWarp) {
      uint32_t keys[kAtOnce] = {};
      int32_t positions[kAtOnce] = {};
      TIERSTORE_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t i = at + k * kWarp + Lane();
        if (i >= end) continue;
        keys[k] = Load(a.keys + i);
        positions[k] = a.positions != nullptr ? Load(a.positions + i) : static_cast<int32_t>(i);
      }
      TIERSTORE_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t first = at + k * kWarp;
        if (first >= end) continue;
        const unsigned here = LanesBelow(first, end);
        const uint32_t digit = DigitOf(a, keys[k]);
        const DigitsOfWarp digits(digit, here);
        int64_t place = CountBits(digits.Peers() & LanesBefore());
        TIERSTORE_UNROLL
        for (uint32_t own = 0; own < kOwnDigits; ++own) {
          const int32_t of_digit = ShuffleFrom(places[own], static_cast<int>(digit / kOwnDigits));
          place += digit % kOwnDigits == own ? of_digit : 0;
        }
        digits.AddTo(places);
        if ((here >> Lane() & 1) == 0) continue;
        Store(a.sorted_keys + place, keys[k]);
        Store(a.sorted_positions + place, positions[k]);
      }
    }
  });
}

struct alignas(16) FourCounts {
  int32_t v[4];
};

// A warp takes a row; each of its threads has 16 neighbours at a time.
TIERSTORE_DEVICE void SumRows(const SumsArgs& a) {
  constexpr int kWords = 4, kOfThread = 4 * kWords;
  const int64_t warps_of_block = blockDim.x / kWarp, step = gridDim.x * warps_of_block;
  for (int64_t row = blockIdx.x * warps_of_block + threadIdx.x / kWarp; row < a.num_rows; row += step) {
    int32_t* const numbers = a.rows + row * a.stride;
    int32_t before = 0;  // of the numbers that are done
    for (int64_t begin = 0; begin < a.columns; begin += kOfThread * kWarp) {
      const int64_t first = begin + kOfThread * Lane();
      FourCounts words[kWords] = {};
      int32_t own = 0;
      TIERSTORE_UNROLL
      for (int w = 0; w < kWords; ++w) {
        if (first + 4 * w < a.columns)
          words[w] = Load(reinterpret_cast<const FourCounts*>(numbers + first) + w);
      }
      TIERSTORE_UNROLL
      for (int i = 0; i < kOfThread; ++i) own += first + i < a.columns ? words[i / 4].v[i % 4] : 0;
      const int32_t up_to = SumUpTo(own);
      int32_t sum = before + up_to - own;
      TIERSTORE_UNROLL
      for (int i = 0; i < kOfThread; ++i) {
        const int32_t number = words[i / 4].v[i % 4];
        words[i / 4].v[i % 4] = sum;
        sum += number;
      }
      TIERSTORE_UNROLL
      for (int w = 0; w < kWords; ++w) {
        if (first + 4 * w < a.columns) Store(reinterpret_cast<FourCounts*>(numbers + first) + w, words[w]);
      }
      before += ShuffleFrom(up_to, kWarp - 1);
    }
    if (Lane() == 0) Store(a.totals + row, before);
  }
}

}  // namespace tierstore::cuda
