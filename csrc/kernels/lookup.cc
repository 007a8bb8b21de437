#include "kernels/lookup.h"

#include <algorithm>

#include "kernels/vec.h"

namespace tierstore {
namespace {

constexpr std::int64_t kPrefetchPositions = 16;
constexpr std::int64_t kPiecePositions = 512;

TIERSTORE_INLINE void PrefetchPosition(const Gather& g, std::int64_t p) {
  const std::int32_t u = g.inverse[p];
  if (u >= 0) Prefetch<false>(g.rows.At(g.slots[u]), g.dim * 4);
}

// Calls body(row, p) for the positions of a bag that are not skipped. The caller sets `prefetch` in one of
// its passes.
template <typename Body>
TIERSTORE_INLINE void ForRows(const Gather& g, std::int64_t begin, std::int64_t end,
                              std::int64_t prefetch_end, const Body& body) {
  for (std::int64_t p = begin; p < end; ++p) {
    if (p + kPrefetchPositions < prefetch_end) PrefetchPosition(g, p + kPrefetchPositions);
    const std::int32_t u = g.inverse[p];
    if (u >= 0) body(g.rows.At(g.slots[u]), p);
  }
}

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
    FeatureCursor feature(args.bags, begin);
    for (std::int64_t bag = begin; bag < end; ++bag) {
      feature.MoveTo(bag);
      float* out = args.out + feature.OutputOf(bag);
      const std::int64_t first = args.bags.offsets[bag], last = args.bags.offsets[bag + 1];
      if (feature.pooling() == Pooling::kMax) {
        MaxBag<W>(args, first, last, out,
                  args.argmax != nullptr ? args.argmax + bag * args.gather.dim : nullptr);
        continue;
      }
      float divisor = 1.0f;
      if (feature.pooling() == Pooling::kMean) {
        const std::int64_t used = CountUsed(args.gather.inverse, first, last);
        if (used > 0) divisor = static_cast<float>(used);
      }
      if (args.weights == nullptr) {
        SumBag<W, false>(args, first, last, divisor, out);
      } else {
        SumBag<W, true>(args, first, last, divisor, out);
      }
    }
  }

  template <int W, bool kWeighted>
  TIERSTORE_INLINE static void SumBag(const Args& args, std::int64_t first, std::int64_t last, float divisor,
                                      float* out) {
    const Gather& g = args.gather;
    ForColumns<W>(g.dim, [&](auto block, std::int64_t c) __attribute__((always_inline)) {
      using B = decltype(block);
      using V = typename VecTypes<B::kLanes>::Float;
      V sums[B::kVectors] = {};
      const std::int64_t prefetch_end = c == 0 ? args.bags.num_positions() : 0;
      ForRows(g, first, last, prefetch_end,
              [&](const float* row, std::int64_t p) __attribute__((always_inline)) {
                for (int i = 0; i < B::kVectors; ++i) {
                  V x;
                  Load(x, row + c + i * B::kLanes);
                  if constexpr (kWeighted) x *= args.weights[p];
                  sums[i] += x;
                }
              });
      for (int i = 0; i < B::kVectors; ++i) {
        if (divisor != 1.0f) sums[i] /= divisor;
        Store(out + c + i * B::kLanes, sums[i]);
      }
    });
  }

  template <int W>
  TIERSTORE_INLINE static void MaxBag(const Args& args, std::int64_t first, std::int64_t last, float* out,
                                      std::int32_t* argmax) {
    const Gather& g = args.gather;
    ForColumns<W>(g.dim, [&](auto block, std::int64_t c) __attribute__((always_inline)) {
      using B = decltype(block);
      using V = typename VecTypes<B::kLanes>::Float;
      using I = typename VecTypes<B::kLanes>::Int;
      V best[B::kVectors] = {};
      I where[B::kVectors];
      for (int i = 0; i < B::kVectors; ++i) where[i] = I{} - 1;
      const std::int64_t prefetch_end = c == 0 ? args.bags.num_positions() : 0;
      ForRows(g, first, last, prefetch_end,
              [&](const float* row, std::int64_t p) __attribute__((always_inline)) {
                const I here = I{} + static_cast<std::int32_t>(p);
                for (int i = 0; i < B::kVectors; ++i) {
                  V x;
                  Load(x, row + c + i * B::kLanes);
                  const auto better = (x > best[i]) | (x != x) | (where[i] < 0);
                  best[i] = better ? x : best[i];
                  where[i] = better ? here : where[i];
                }
              });
      for (int i = 0; i < B::kVectors; ++i) {
        Store(out + c + i * B::kLanes, best[i]);
        if (argmax != nullptr) Store(argmax + c + i * B::kLanes, where[i]);
      }
    });
  }
};

struct RowsKernel {
  struct Args {
    Gather gather;
    std::int64_t n;
    float* out;
    std::int64_t out_stride;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const Gather& g = args.gather;
    for (std::int64_t p = begin; p < end; ++p) {
      if (p + kPrefetchPositions < args.n) PrefetchPosition(g, p + kPrefetchPositions);
      const std::int32_t u = g.inverse[p];
      const float* row = u >= 0 ? g.rows.At(g.slots[u]) : nullptr;
      float* out = args.out + p * args.out_stride;
      ForColumns<W>(g.dim, [&](auto block, std::int64_t c) __attribute__((always_inline)) {
        using B = decltype(block);
        using V = typename VecTypes<B::kLanes>::Float;
        for (int i = 0; i < B::kVectors; ++i) {
          V x = {};
          if (row != nullptr) Load(x, row + c + i * B::kLanes);
          Store(out + c + i * B::kLanes, x);
        }
      });
    }
  }
};

struct WeightGradsKernel {
  struct Args {
    Gather gather;
    Bags bags;
    const float* grad;
    float* out;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const Gather& g = args.gather;
    FeatureCursor feature(args.bags, begin);
    for (std::int64_t bag = begin; bag < end; ++bag) {
      feature.MoveTo(bag);
      const float* grad = args.grad + feature.OutputOf(bag);
      const std::int64_t first = args.bags.offsets[bag], last = args.bags.offsets[bag + 1];
      std::fill(args.out + first, args.out + last, 0.0f);
      if (feature.pooling() == Pooling::kMax) continue;
      float scale = 1.0f;
      if (feature.pooling() == Pooling::kMean) {
        scale = 1.0f / static_cast<float>(CountUsed(g.inverse, first, last));
      }
      ForRows(g, first, last, args.bags.num_positions(),
              [&](const float* row, std::int64_t p)
                  __attribute__((always_inline)) { args.out[p] = Dot<W>(grad, row, g.dim) * scale; });
    }
  }
};

}  // namespace

void LookupPooled(const Gather& gather, const Bags& bags, const float* weights, float* out,
                  std::int32_t* argmax) {
  bags.Check();
  CheckInverse(gather.inverse, bags.num_positions(), gather.num_slots);
  RunKernel<PooledKernel>({gather, bags, weights, out, argmax}, 0, bags.num_bags,
                          BagGrain(bags, kPiecePositions));
}

void LookupRows(const Gather& gather, std::int64_t n, float* out, std::int64_t out_stride) {
  CheckInverse(gather.inverse, n, gather.num_slots);
  RunKernel<RowsKernel>({gather, n, out, out_stride}, 0, n, kPiecePositions);
}

void WeightGrads(const Gather& gather, const Bags& bags, const float* grad, float* out) {
  bags.Check();
  CheckInverse(gather.inverse, bags.num_positions(), gather.num_slots);
  RunKernel<WeightGradsKernel>({gather, bags, grad, out}, 0, bags.num_bags, BagGrain(bags, kPiecePositions));
}

}  // namespace tierstore
