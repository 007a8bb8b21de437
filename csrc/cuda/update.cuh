// Backward kernels: gradients of rows and the fused optimizer step; kernels/update.h says what they compute.
#pragma once

#include "cuda/lookup.cuh"
#include "cuda/optimizer.cuh"

namespace tierstore::cuda {

constexpr int kReducePositions = 256;  // as kernels/update.h

TIERSTORE_DEVICE void BagShares(const BagSharesArgs& a) {
  ForItems<1>(a.bags.num_bags, [&](int64_t bag, bool inside) {
    if (!inside) return;
    const int64_t feature = FeatureOf(a.bags, bag);
    const int64_t first = Load(a.bags.offsets + bag), last = Load(a.bags.offsets + bag + 1);
    const uint8_t pooling = Load(a.bags.poolings + feature);
    for (int64_t p = first; p < last; ++p) Store(a.bag_of + p, static_cast<int32_t>(bag));
    BagShare share = {OutputOf(a.bags, feature, bag), pooling == kMax ? bag * a.dim : -1, 1.0f, 0};
    if (pooling == kMean && last > first)
      share.scale = 1.0f / static_cast<float>(CountUsed(a.inverse, first, last));
    Store(a.shares + bag, share);
  });
}

template <int kDim, int kVec, int kKind, int kType>
struct Update {
  using G = Group<kDim, kVec>;
  using Row = TypedRow<kDim, kVec, kType>;
  using Columns = typename G::Columns;
  static constexpr int kAhead = 4;  // gradients that are being read at once

  struct Share {
    const float* grad;
    const int32_t* argmax;
    float scale;
  };

  static TIERSTORE_DEVICE Share ShareOf(const GradsArgs& a, int32_t p) {
    if (a.shares == nullptr) return {a.grad + p * a.stride, nullptr, 1.0f};
    const BagShare bag = Load(a.shares + Load(a.bag_of + p));
    const bool is_max = bag.argmax >= 0;
    const bool weighted = a.weights != nullptr && !is_max;
    return {a.grad + bag.grad, is_max ? a.argmax + bag.argmax : nullptr,
            weighted ? Load(a.weights + p) * bag.scale : bag.scale};
  }

  static TIERSTORE_DEVICE Columns Gradient(const Share& share, int32_t p) {
    Columns grad = G::Read(share.grad);
    if (share.argmax == nullptr) return grad;
    TIERSTORE_UNROLL
    for (int i = 0; i < G::kWords; ++i) {
      if (!G::Has(i)) continue;
      TIERSTORE_UNROLL
      for (int j = 0; j < kVec; ++j) {
        if (Load(share.argmax + (i * G::kLanes + G::lane()) * kVec + j) != p) grad.w[i].v[j] = 0.0f;
      }
    }
    return grad;
  }

  // The sum of the shares of `count` positions, in order.
  static TIERSTORE_DEVICE Columns Reduce(const UpdateArgs& a, const int32_t* positions, int64_t count) {
    Columns sums = {};
    for (int64_t k = 0; k < count; k += kAhead) {
      Columns grads[kAhead];
      float scale[kAhead];
      TIERSTORE_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (k + i >= count) continue;
        const int32_t p = Load(positions + k + i);
        const Share share = ShareOf(a.grads, p);
        grads[i] = Gradient(share, p);
        scale[i] = share.scale;
      }
      TIERSTORE_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (k + i >= count) continue;
        const float factor = scale[i];
        G::ForEach([=](float& sum, const float& x) { sum += factor * x; }, sums, grads[i]);
      }
    }
    return sums;
  }

  static TIERSTORE_DEVICE bool HasBadColumn(const Columns& g) {
    bool bad = false;
    G::ForEach([&](const float& x) { bad = bad || !IsFinite(x); }, g);
    return bad;
  }

  // Updates the row of unique row u; nothing where `inside` is false. All threads of the warp must call it.
  static TIERSTORE_DEVICE void Apply(const UpdateArgs& a, int64_t u, bool inside, Columns g) {
    const int64_t slot = inside ? Load(a.slots + u) : 0;
    float* const row = a.rows.weights + slot * a.rows.weight_floats;
    const bool wants_check = a.check_finite != 0 || a.squares != nullptr;
    bool bad = wants_check && G::Any(HasBadColumn(g));
    const float mean = inside && a.means != nullptr ? Load(a.means + u) : 0.0f;
    bad = bad || (a.check_finite != 0 && mean != mean);
    const OptimizerOf<kDim, kVec, kKind, kType> step{a.step, a.rows.state + slot * a.rows.state_floats,
                                                     inside && !bad};
    Columns weight = {};
    if (inside) weight = Row::Weights(row);
    if (a.squares == nullptr) step.DecayMissed(weight);
    ClipGradient<G>(a.step, g);
    if (a.step.l2 != 0.0f) G::ForEach([&](float& x, const float& w) { x += a.step.l2 * w; }, g, weight);
    if (a.squares != nullptr) {
      const float square = G::Dot(g, g);
      if (inside && G::lane() == 0) Store(a.squares + u, bad ? FloatOf(0x7fc00000u) : square);
      return;
    }
    if (a.check_finite != 0 && inside && bad && G::lane() == 0)
      Store(a.rejected + u, static_cast<uint8_t>(1));
    step.Apply(g, weight, a.means != nullptr, mean);
    if (step.updates) Row::SetWeights(row, weight, DiceOf(a.rounding, u, a.step.number));
  }

  static TIERSTORE_DEVICE void Cold(const UpdateArgs& a) {
    ForItems<G::kLanes>(a.num_slots, [&](int64_t u, bool inside) {
      const int32_t first = inside ? Load(a.csr_start + u) : 0, last = inside ? Load(a.csr_start + u + 1) : 0;
      const int32_t count = last - first;
      const bool cold = count > 0 && count <= kReducePositions;
      Apply(a, u, cold, cold ? Reduce(a, a.csr_positions + first, count) : Columns{});
    });
  }

  static TIERSTORE_DEVICE void Pieces(const UpdateArgs& a) {
    ForItems<G::kLanes>(Load(a.hot_piece + a.num_hot), [&](int64_t piece, bool inside) {
      if (!inside) return;
      int64_t row = 0;
      for (int64_t last = a.num_hot; last - row > 1;) {
        const int64_t middle = row + (last - row) / 2;
        if (Load(a.hot_piece + middle) <= piece)
          row = middle;
        else
          last = middle;
      }
      const int64_t u = Load(a.hot + row), skip = (piece - Load(a.hot_piece + row)) * kReducePositions;
      const int64_t first = Load(a.csr_start + u) + skip, left = Load(a.csr_start + u + 1) - first;
      const int64_t count = left < kReducePositions ? left : kReducePositions;
      G::Write(a.partials + piece * kDim, Reduce(a, a.csr_positions + first, count));
    });
  }

  static TIERSTORE_DEVICE void Hot(const UpdateArgs& a) {
    ForItems<G::kLanes>(a.num_hot, [&](int64_t row, bool inside) {
      Columns g = {};
      int64_t u = 0;
      if (inside) {
        u = Load(a.hot + row);
        const int64_t first = Load(a.hot_piece + row), last = Load(a.hot_piece + row + 1);
        g = G::Read(a.partials + first * kDim);
        for (int64_t piece = first + 1; piece < last; ++piece) {
          const Columns more = G::Read(a.partials + piece * kDim);
          G::ForEach([](float& sum, const float& x) { sum += x; }, g, more);
        }
      }
      Apply(a, u, inside, g);
    });
  }
};

}  // namespace tierstore::cuda
