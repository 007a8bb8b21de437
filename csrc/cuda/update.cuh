// Backward kernels: gradients of rows and the fused optimizer step; kernels/update.h says what they compute.
#pragma once

#include "cuda/lookup.cuh"
#include "cuda/optimizer.cuh"

namespace tierstore::cuda {

constexpr int kReducePositions = 256;  // as kernels/update.h
constexpr int kLongPositions = 32;     // rows with more are those that update_cold begins with

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

// What a position gives to the gradient of its row.
struct Share {
  int64_t grad;
  int64_t argmax;  // -1: not of a max
  float scale;
  int32_t position;
};

TIERSTORE_DEVICE Share ShareOf(const GradsArgs& a, int32_t p) {
  if (a.shares == nullptr) return {p * a.stride, -1, 1.0f, p};
  const BagShare bag = Load(a.shares + Load(a.bag_of + p));
  const bool weighted = a.weights != nullptr && bag.argmax < 0;
  return {bag.grad, bag.argmax, weighted ? Load(a.weights + p) * bag.scale : bag.scale, p};
}

// What thread `lane` of the warp has. All threads of the warp must call it.
TIERSTORE_DEVICE Share FromThread(const GradsArgs& a, const Share& share, int lane) {
  Share got = {ShuffleFrom(share.grad, lane), -1, ShuffleFrom(share.scale, lane), 0};
  if (a.argmax != nullptr) {
    got.argmax = ShuffleFrom(share.argmax, lane);
    got.position = ShuffleFrom(share.position, lane);
  }
  return got;
}

template <int kDim, int kVec, int kKind, int kType>
struct Update {
  using G = Group<kDim, kVec>;
  using Row = TypedRow<kDim, kVec, kType>;
  using Step = OptimizerOf<kDim, kVec, kKind, kType>;
  using Columns = typename G::Columns;
  static constexpr int64_t kWeightBytes = kType == kFloat32 ? 4 * kDim : 2 * kDim;
  // Where units of 64 bytes have weights of two rows, or weights and state, the near cache must keep them.
  static constexpr Hint kHint = kWeightBytes % 64 == 0 ? kStreamed : kCached;
  // Blocks whose registers must fit a multiprocessor: in update_cold, each group waits for one row.
  static constexpr int kBlocks = G::kWords * kVec <= 4 ? 3 : 2;
  static constexpr int kBlocksOfCold = kBlocks + (kBlocks == 3 && Step::kOfColumn == 0 ? 1 : 0);
  // Rows that a group reads at once, if most rows have one position.
  static constexpr int kRowsAtOnce = G::AtOnce(4, 2 + Step::kOfColumn);

  static TIERSTORE_DEVICE Columns Gradient(const GradsArgs& a, const Share& share) {
    Columns grad = G::template Read<kVec, kReadOnly>(a.grad + share.grad);
    if (share.argmax < 0) return grad;
    TIERSTORE_UNROLL
    for (int i = 0; i < G::kWords; ++i) {
      if (!G::Has(i)) continue;
      TIERSTORE_UNROLL
      for (int j = 0; j < kVec; ++j) {
        const int32_t at = Load(a.argmax + share.argmax + (i * G::kLanes + G::lane()) * kVec + j);
        if (at != share.position) grad.w[i].v[j] = 0.0f;
      }
    }
    return grad;
  }

  // Adds the shares of `count` positions to `sums`, in order. Each thread of the group finds out about a
  // position, and the group reads kMost gradients at once. A sum is never -0, so a missing share may be
  // added as 0. All threads of the warp must call it.
  template <int kMost>
  static TIERSTORE_DEVICE void Reduce(const GradsArgs& a, const int32_t* positions, int32_t count,
                                      Columns& sums) {
    constexpr int kAhead = G::AtOnce(kMost < G::kLanes ? kMost : G::kLanes);
    const int32_t turns = MostOfWarp(count);
    for (int32_t k = 0; k < turns; k += G::kLanes) {
      Share mine = {0, -1, 0.0f, 0};
      if (k + G::lane() < count) mine = ShareOf(a, Load(positions + k + G::lane()));
      for (int32_t j = 0; j < G::kLanes && k + j < turns; j += kAhead) {
        Columns grads[kAhead];
        float scale[kAhead];
        TIERSTORE_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          const Share share = FromThread(a, mine, G::first() + j + i);
          scale[i] = share.scale;
          grads[i] = {};
          if (k + j + i < count) grads[i] = Gradient(a, share);
        }
        TIERSTORE_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          const float factor = scale[i];
          G::ForEach([=](float& sum, const float& x) { sum += factor * x; }, sums, grads[i]);
        }
      }
    }
  }

  static TIERSTORE_DEVICE bool HasBadColumn(const Columns& g) {
    bool bad = false;
    G::ForEach([&](const float& x) { bad = bad || !IsFinite(x); }, g);
    return bad;
  }

  // The row of unique row u, which is being updated; no row where `inside` is false.
  struct UsedRow {
    int32_t u, slot;
    bool inside;
    typename Row::Packed weights;
    typename Step::State state;
  };

  // Reads the row, before its gradients are.
  static TIERSTORE_DEVICE UsedRow Use(const UpdateArgs& a, int32_t u, bool inside, int32_t slot) {
    UsedRow row = {u, slot, inside, {}, {}};
    if (!inside) return row;
    row.weights = Row::template Read<kHint>(a.rows.weights + slot * a.rows.weight_floats);
    if (a.squares == nullptr) row.state = Step::Read(a.step, a.rows.state + slot * a.rows.state_floats);
    return row;
  }

  // Updates the row. All threads of the warp must call it.
  static TIERSTORE_DEVICE void Apply(const UpdateArgs& a, UsedRow& row, Columns g) {
    const bool inside = row.inside, wants_check = a.check_finite != 0 || a.squares != nullptr;
    bool bad = wants_check && G::Any(HasBadColumn(g));
    const float mean = inside && a.means != nullptr ? Load(a.means + row.u) : 0.0f;
    bad = bad || (a.check_finite != 0 && mean != mean);
    const Step step{a.step, a.rows.state + row.slot * a.rows.state_floats, inside && !bad};
    Columns weight = Row::Widened(row.weights);
    if (a.squares == nullptr) step.DecayMissed(row.state, weight);
    ClipGradient<G>(a.step, g);
    if (a.step.l2 != 0.0f) G::ForEach([&](float& x, const float& w) { x += a.step.l2 * w; }, g, weight);
    if (a.squares != nullptr) {
      const float square = G::Dot(g, g);
      if (inside && G::lane() == 0) Store(a.squares + row.u, bad ? FloatOf(0x7fc00000u) : square);
      return;
    }
    if (a.check_finite != 0 && inside && bad && G::lane() == 0)
      Store(a.rejected + row.u, static_cast<uint8_t>(1));
    step.Apply(g, row.state, weight, a.means != nullptr, mean);
    if (step.updates) {
      Row::template SetWeights<kHint>(a.rows.weights + row.slot * a.rows.weight_floats, weight,
                                      DiceOf(a.rounding, row.u, a.step.number));
    }
  }

  // The positions of a row that is not hot.
  struct Positions {
    int32_t first, count;
  };
  static TIERSTORE_DEVICE Positions ColdPositions(const UpdateArgs& a, int64_t u) {
    const int32_t first = Load(a.csr_start + u), count = Load(a.csr_start + u + 1) - first;
    return {first, count <= kReducePositions ? count : 0};
  }

  // A group per row. The host lists rows with many positions, which come first: one that begins last would
  // keep the GPU waiting.
  static TIERSTORE_DEVICE void Cold(const UpdateArgs& a) {
    ForItems<G::kLanes>(a.num_long + a.num_slots, [&](int64_t item, bool inside) {
      int32_t u = static_cast<int32_t>(item) - a.num_long;
      Positions at = {0, 0};
      if (inside) {
        const bool is_long = u < 0;
        if (is_long) u = Load(a.hot + a.num_hot + 1 + item);
        at = ColdPositions(a, u);
        if (!is_long && at.count > kLongPositions) at.count = 0;
      }
      UsedRow row = Use(a, u, at.count > 0, at.count > 0 ? Load(a.slots + u) : 0);
      Columns sums = {};
      Reduce<4>(a.grads, a.csr_positions + at.first, at.count, sums);
      Apply(a, row, sums);
    });
  }

  // The same where most rows have one position. Each thread of a warp finds out about one row and its first
  // position; then each group of the warp reads the rows and first gradients of kRowsAtOnce rows at once.
  static TIERSTORE_DEVICE void ColdSingles(const UpdateArgs& a) {
    ForItems<1>(a.num_slots, [&](int64_t mine, bool inside) {
      const Positions my = inside ? ColdPositions(a, mine) : Positions{0, 0};
      const int32_t my_slot = my.count > 0 ? Load(a.slots + mine) : 0;
      Share my_share = {0, -1, 0.0f, 0};
      if (my.count > 0) my_share = ShareOf(a.grads, Load(a.csr_positions + my.first));
      const bool all_single = MostOfWarp(my.count) <= 1;
      const int32_t begin = static_cast<int32_t>(mine - threadIdx.x % kWarp);
      for (int j = 0; j < G::kLanes; j += kRowsAtOnce) {
        UsedRow rows[kRowsAtOnce];
        Columns grads[kRowsAtOnce];
        float scale[kRowsAtOnce];
        TIERSTORE_UNROLL
        for (int k = 0; k < kRowsAtOnce; ++k) {
          const int from = ThreadOfRow(j + k);
          const bool has = ShuffleFrom(my.count, from) > 0;
          rows[k] = Use(a, begin + from, has, ShuffleFrom(my_slot, from));
          const Share share = FromThread(a.grads, my_share, from);
          scale[k] = share.scale;
          grads[k] = {};
          if (has) grads[k] = Gradient(a.grads, share);
        }
        TIERSTORE_UNROLL
        for (int k = 0; k < kRowsAtOnce; ++k) {
          const int from = ThreadOfRow(j + k);
          const float factor = scale[k];
          Columns sums = {};
          G::ForEach([=](float& sum, const float& x) { sum += factor * x; }, sums, grads[k]);
          if (!all_single) {
            const int32_t first = ShuffleFrom(my.first, from), count = ShuffleFrom(my.count, from);
            Reduce<2>(a.grads, a.csr_positions + first + 1, count - 1, sums);
          }
          Apply(a, rows[k], sums);
        }
      }
    });
  }

  // The thread of the warp that found out about row i of this thread's group.
  static TIERSTORE_DEVICE int ThreadOfRow(int i) {
    return i * (kWarp / G::kLanes) + static_cast<int>(threadIdx.x % kWarp) / G::kLanes;
  }

  static TIERSTORE_DEVICE void Pieces(const UpdateArgs& a) {
    ForItems<G::kLanes>(Load(a.hot_piece + a.num_hot), [&](int64_t piece, bool inside) {
      int64_t first = 0, count = 0;
      if (inside) {
        int64_t row = 0;
        for (int64_t last = a.num_hot; last - row > 1;) {
          const int64_t middle = row + (last - row) / 2;
          if (Load(a.hot_piece + middle) <= piece)
            row = middle;
          else
            last = middle;
        }
        const int64_t u = Load(a.hot + row), skip = (piece - Load(a.hot_piece + row)) * kReducePositions;
        first = Load(a.csr_start + u) + skip;
        const int64_t left = Load(a.csr_start + u + 1) - first;
        count = left < kReducePositions ? left : kReducePositions;
      }
      Columns sums = {};
      Reduce<8>(a.grads, a.csr_positions + first, static_cast<int32_t>(count), sums);
      if (inside) G::Write(a.partials + piece * kDim, sums);
    });
  }

  static TIERSTORE_DEVICE void Hot(const UpdateArgs& a) {
    ForItems<G::kLanes>(a.num_hot, [&](int64_t hot, bool inside) {
      const int32_t u = inside ? Load(a.hot + hot) : 0;
      UsedRow row = Use(a, u, inside, inside ? Load(a.slots + u) : 0);
      Columns g = {};
      if (inside) {
        const int64_t first = Load(a.hot_piece + hot), last = Load(a.hot_piece + hot + 1);
        g = G::Read(a.partials + first * kDim);
        for (int64_t piece = first + 1; piece < last; ++piece) {
          const Columns more = G::Read(a.partials + piece * kDim);
          G::ForEach([](float& sum, const float& x) { sum += x; }, g, more);
        }
      }
      Apply(a, row, g);
    });
  }
};

}  // namespace tierstore::cuda
