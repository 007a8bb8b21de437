#include "kernels/lookup.h"

#include <algorithm>

#include "kernels/weights.h"

namespace tierstore {
namespace {

constexpr std::int64_t kPiecePositions = 512;
constexpr std::int64_t kBagsAhead = 4;  // the output of bags is prefetched so far ahead

// Reads rows by position, in loops over consecutive positions: each read prefetches the row of a later read.
template <typename Weights>
class RowReader {
 public:
  TIERSTORE_INLINE RowReader(const Gather& gather, std::int64_t num_positions)
      : gather_(gather), ahead_(PrefetchAhead(gather.dim * Weights::kBytes)), end_(num_positions - ahead_) {}

  // Returns the row of p from column c on, for a block of columns; null when p is skipped.
  template <typename B>
  TIERSTORE_INLINE std::uint8_t* At(std::int64_t p, B, std::int64_t c) const {
    return Read(p, Weights::kBytes * c, Weights::kBytes * B::kLanes * B::kVectors);
  }
  // Returns the whole row of p.
  TIERSTORE_INLINE std::uint8_t* At(std::int64_t p) const {
    return Read(p, 0, Weights::kBytes * gather_.dim);
  }

 private:
  TIERSTORE_INLINE std::uint8_t* Read(std::int64_t p, std::int64_t begin, std::int64_t bytes) const {
    if (p < end_) {
      const std::int32_t later = gather_.inverse[p + ahead_];
      if (later >= 0) Prefetch<false>(gather_.rows.At(gather_.slots[later]) + begin, bytes);
    }
    const std::int32_t u = gather_.inverse[p];
    return u >= 0 ? gather_.rows.At(gather_.slots[u]) + begin : nullptr;
  }

  const Gather gather_;
  const std::int64_t ahead_;
  const std::int64_t end_;
};

// Loads vector i of a block of weights.
template <typename Weights, typename B>
TIERSTORE_INLINE auto LoadWeights(const std::uint8_t* from, B, int i) {
  return Weights::template LoadVector<B::kLanes>(from + i * B::kLanes * Weights::kBytes);
}

template <typename Weights>
struct PooledKernel {
  struct Args {
    Gather gather;
    Bags bags;
    const float* weights;
    float* out;
    std::int32_t* argmax;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const RowReader<Weights> rows(args.gather, args.bags.num_positions());
    FeatureCursor feature(args.bags, begin);
    for (std::int64_t bag = begin; bag < end; ++bag) {
      feature.MoveTo(bag);
      Prefetch<true>(args.out + feature.OutputOf(bag + kBagsAhead), args.gather.dim * 4);
      float* out = args.out + feature.OutputOf(bag);
      const std::int64_t first = args.bags.offsets[bag], last = args.bags.offsets[bag + 1];
      if (feature.pooling() == Pooling::kMax) {
        MaxBag<W>(args, rows, first, last, out,
                  args.argmax != nullptr ? args.argmax + bag * args.gather.dim : nullptr);
        continue;
      }
      float divisor = 1.0f;
      if (feature.pooling() == Pooling::kMean) {
        const std::int64_t used = CountUsed(args.gather.inverse, first, last);
        if (used > 0) divisor = static_cast<float>(used);
      }
      if (args.weights == nullptr) {
        SumBag<W, false>(args, rows, first, last, divisor, out);
      } else {
        SumBag<W, true>(args, rows, first, last, divisor, out);
      }
    }
  }

  template <int W, bool kWeighted>
  TIERSTORE_INLINE static void SumBag(const Args& args, const RowReader<Weights>& rows, std::int64_t first,
                                      std::int64_t last, float divisor, float* out) {
    ForColumns<W>(args.gather.dim, [&](auto block, std::int64_t c) __attribute__((always_inline)) {
      using B = decltype(block);
      using V = typename VecTypes<B::kLanes>::Float;
      V sums[B::kVectors] = {};
      for (std::int64_t p = first; p < last; ++p) {
        const std::uint8_t* row = rows.At(p, block, c);
        if (row == nullptr) continue;
        for (int i = 0; i < B::kVectors; ++i) {
          V x = LoadWeights<Weights>(row, block, i);
          if constexpr (kWeighted) x *= args.weights[p];
          sums[i] += x;
        }
      }
      for (int i = 0; i < B::kVectors; ++i) {
        if (divisor != 1.0f) sums[i] /= divisor;
        Store(out + c + i * B::kLanes, sums[i]);
      }
    });
  }

  template <int W>
  TIERSTORE_INLINE static void MaxBag(const Args& args, const RowReader<Weights>& rows, std::int64_t first,
                                      std::int64_t last, float* out, std::int32_t* argmax) {
    ForColumns<W>(args.gather.dim, [&](auto block, std::int64_t c) __attribute__((always_inline)) {
      using B = decltype(block);
      using V = typename VecTypes<B::kLanes>::Float;
      using I = typename VecTypes<B::kLanes>::Int;
      V best[B::kVectors] = {};
      I where[B::kVectors];
      for (int i = 0; i < B::kVectors; ++i) where[i] = I{} - 1;
      for (std::int64_t p = first; p < last; ++p) {
        const std::uint8_t* row = rows.At(p, block, c);
        if (row == nullptr) continue;
        const I here = I{} + static_cast<std::int32_t>(p);
        for (int i = 0; i < B::kVectors; ++i) {
          const V x = LoadWeights<Weights>(row, block, i);
          const auto better = (x > best[i]) | (x != x) | (where[i] < 0);
          best[i] = better ? x : best[i];
          where[i] = better ? here : where[i];
        }
      }
      for (int i = 0; i < B::kVectors; ++i) {
        Store(out + c + i * B::kLanes, best[i]);
        if (argmax != nullptr) Store(argmax + c + i * B::kLanes, where[i]);
      }
    });
  }
};

template <typename Weights>
struct RowsKernel {
  struct Args {
    Gather gather;
    std::int64_t n;
    float* out;
    std::int64_t out_stride;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const RowReader<Weights> rows(args.gather, args.n);
    for (std::int64_t p = begin; p < end; ++p) {
      float* out = args.out + p * args.out_stride;
      ForColumns<W>(args.gather.dim, [&](auto block, std::int64_t c) __attribute__((always_inline)) {
        using B = decltype(block);
        using V = typename VecTypes<B::kLanes>::Float;
        const std::uint8_t* row = rows.At(p, block, c);
        for (int i = 0; i < B::kVectors; ++i) {
          V x = {};
          if (row != nullptr) x = LoadWeights<Weights>(row, block, i);
          Store(out + c + i * B::kLanes, x);
        }
      });
    }
  }
};

template <typename Weights>
struct WeightGradsKernel {
  struct Args {
    Gather gather;
    Bags bags;
    const float* grad;
    float* out;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const RowReader<Weights> rows(args.gather, args.bags.num_positions());
    FeatureCursor feature(args.bags, begin);
    float* room = Scratch(args.gather.dim);
    for (std::int64_t bag = begin; bag < end; ++bag) {
      feature.MoveTo(bag);
      const float* grad = args.grad + feature.OutputOf(bag);
      const std::int64_t first = args.bags.offsets[bag], last = args.bags.offsets[bag + 1];
      if (feature.pooling() == Pooling::kMax) {
        std::fill(args.out + first, args.out + last, 0.0f);
        continue;
      }
      float scale = 1.0f;
      if (feature.pooling() == Pooling::kMean) {
        scale = 1.0f / static_cast<float>(CountUsed(args.gather.inverse, first, last));
      }
      for (std::int64_t p = first; p < last; ++p) {
        std::uint8_t* row = rows.At(p);
        args.out[p] = 0.0f;
        if (row == nullptr) continue;
        const std::int64_t dim = args.gather.dim;
        args.out[p] = Dot<W>(grad, Weights::template Widen<W>(row, dim, room), dim) * scale;
      }
    }
  }
};

}  // namespace

void LookupPooled(const Gather& gather, const Bags& bags, const float* weights, float* out,
                  std::int32_t* argmax) {
  bags.Check();
  CheckInverse(gather.inverse, bags.num_positions(), gather.num_slots);
  WithWeights(gather.rows.weights, [&](auto type) {
    RunKernel<PooledKernel<decltype(type)>>({gather, bags, weights, out, argmax}, 0, bags.num_bags,
                                            BagGrain(bags, kPiecePositions));
  });
}

void LookupRows(const Gather& gather, std::int64_t n, float* out, std::int64_t out_stride) {
  CheckInverse(gather.inverse, n, gather.num_slots);
  WithWeights(gather.rows.weights, [&](auto type) {
    RunKernel<RowsKernel<decltype(type)>>({gather, n, out, out_stride}, 0, n, kPiecePositions);
  });
}

void WeightGrads(const Gather& gather, const Bags& bags, const float* grad, float* out) {
  bags.Check();
  CheckInverse(gather.inverse, bags.num_positions(), gather.num_slots);
  WithWeights(gather.rows.weights, [&](auto type) {
    RunKernel<WeightGradsKernel<decltype(type)>>({gather, bags, grad, out}, 0, bags.num_bags,
                                                 BagGrain(bags, kPiecePositions));
  });
}

}  // namespace tierstore
