// Forward kernels and the gradients of per-sample weights; kernels/lookup.h says what they compute.
#pragma once

#include "cuda/weights.cuh"

namespace tierstore::cuda {

enum : uint8_t { kSum = 0, kMean = 1, kMax = 2 };

// The feature of a bag: the last one that begins at or before it.
TIERSTORE_DEVICE int64_t FeatureOf(const BagsArgs& bags, int64_t bag) {
  int64_t first = 0, last = bags.num_features;
  while (last - first > 1) {
    const int64_t middle = first + (last - first) / 2;
    if (Load(bags.bag_start + middle) <= bag)
      first = middle;
    else
      last = middle;
  }
  return first;
}

// Of its bag's gradient and pooled vector, in floats.
TIERSTORE_DEVICE int64_t OutputOf(const BagsArgs& bags, int64_t feature, int64_t bag) {
  const int64_t of_feature = bag - Load(bags.bag_start + feature);
  return Load(bags.out_offset + feature) + of_feature * Load(bags.out_stride + feature);
}

TIERSTORE_DEVICE const float* RowOf(const GatherArgs& gather, int64_t position) {
  const int32_t u = Load(gather.inverse + position);
  if (u < 0) return nullptr;
  return gather.rows.weights + static_cast<int64_t>(Load(gather.slots + u)) * gather.rows.weight_floats;
}

TIERSTORE_DEVICE int64_t CountUsed(const int32_t* inverse, int64_t first, int64_t last) {
  int64_t used = 0;
  for (int64_t p = first; p < last; ++p) used += Load(inverse + p) >= 0;
  return used;
}

template <int kDim, int kVec, int kType>
struct Lookup {
  using G = Group<kDim, kVec>;
  using Row = TypedRow<kDim, kVec, kType>;
  using Columns = typename G::Columns;
  static constexpr int kAhead = 4;  // rows that are being read at once

  static TIERSTORE_DEVICE Columns Sum(const LookupPooledArgs& a, int64_t first, int64_t last, bool mean) {
    Columns sums = {};
    int64_t used = 0;
    for (int64_t p = first; p < last; p += kAhead) {
      Columns rows[kAhead];
      bool is_there[kAhead];
      TIERSTORE_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const float* row = p + k < last ? RowOf(a.gather, p + k) : nullptr;
        is_there[k] = row != nullptr;
        if (is_there[k]) rows[k] = Row::Weights(row);
      }
      TIERSTORE_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        if (!is_there[k]) continue;
        ++used;
        if (a.weights != nullptr) {
          const float weight = Load(a.weights + p + k);
          G::ForEach([=](float& x) { x *= weight; }, rows[k]);
        }
        G::ForEach([](float& sum, const float& x) { sum += x; }, sums, rows[k]);
      }
    }
    if (mean && used > 0) {
      const float divisor = static_cast<float>(used);
      G::ForEach([=](float& sum) { sum /= divisor; }, sums);
    }
    return sums;
  }

  static TIERSTORE_DEVICE Columns Max(const LookupPooledArgs& a, int64_t first, int64_t last, int64_t bag) {
    Columns best = {};
    int32_t where[G::kWords][kVec];
    TIERSTORE_UNROLL
    for (int i = 0; i < G::kWords; ++i) {
      TIERSTORE_UNROLL
      for (int j = 0; j < kVec; ++j) where[i][j] = -1;
    }
    for (int64_t p = first; p < last; ++p) {
      const float* from = RowOf(a.gather, p);
      if (from == nullptr) continue;
      const Columns row = Row::Weights(from);
      TIERSTORE_UNROLL
      for (int i = 0; i < G::kWords; ++i) {
        TIERSTORE_UNROLL
        for (int j = 0; j < kVec; ++j) {
          const float x = row.w[i].v[j];
          if (!(x > best.w[i].v[j] || x != x || where[i][j] < 0)) continue;
          best.w[i].v[j] = x;
          where[i][j] = static_cast<int32_t>(p);
        }
      }
    }
    if (a.argmax == nullptr) return best;
    TIERSTORE_UNROLL
    for (int i = 0; i < G::kWords; ++i) {
      if (!G::Has(i)) continue;
      int32_t* const to = a.argmax + bag * kDim + (i * G::kLanes + G::lane()) * kVec;
      TIERSTORE_UNROLL
      for (int j = 0; j < kVec; ++j) Store(to + j, where[i][j]);
    }
    return best;
  }

  static TIERSTORE_DEVICE void Pooled(const LookupPooledArgs& a) {
    ForItems<G::kLanes>(a.bags.num_bags, [&](int64_t bag, bool inside) {
      if (!inside) return;
      const int64_t feature = FeatureOf(a.bags, bag);
      const int64_t first = Load(a.bags.offsets + bag), last = Load(a.bags.offsets + bag + 1);
      const uint8_t pooling = Load(a.bags.poolings + feature);
      const Columns pooled =
          pooling == kMax ? Max(a, first, last, bag) : Sum(a, first, last, pooling == kMean);
      G::Write(a.out + OutputOf(a.bags, feature, bag), pooled);
    });
  }

  static TIERSTORE_DEVICE void Rows(const LookupRowsArgs& a) {
    ForItems<G::kLanes>(a.n, [&](int64_t position, bool inside) {
      if (!inside) return;
      const float* row = RowOf(a.gather, position);
      G::Write(a.out + position * a.out_stride, row != nullptr ? Row::Weights(row) : Columns{});
    });
  }

  // One group per bag, since all of its positions need the bag's gradient.
  static TIERSTORE_DEVICE void WeightGrads(const WeightGradsArgs& a) {
    ForItems<G::kLanes>(a.bags.num_bags, [&](int64_t bag, bool inside) {
      int64_t first = 0, last = 0;
      Columns grad = {};
      float scale = 0.0f;
      if (inside) {
        const int64_t feature = FeatureOf(a.bags, bag);
        first = Load(a.bags.offsets + bag), last = Load(a.bags.offsets + bag + 1);
        const uint8_t pooling = Load(a.bags.poolings + feature);
        if (pooling != kMax) grad = G::Read(a.grad + OutputOf(a.bags, feature, bag));
        if (pooling == kSum) scale = 1.0f;
        if (pooling == kMean) scale = 1.0f / static_cast<float>(CountUsed(a.gather.inverse, first, last));
        if (pooling == kMax) {
          for (int64_t p = first + G::lane(); p < last; p += G::kLanes) Store(a.out + p, 0.0f);
          last = first;
        }
      }
      // A warp's groups take as many turns as its longest bag.
      int64_t turns = last - first;
      for (int lanes = G::kLanes; lanes < kWarp; lanes *= 2) {
        const int64_t other = ShuffleXor(turns, lanes);
        turns = other > turns ? other : turns;
      }
      for (int64_t turn = 0; turn < turns; ++turn) {
        const int64_t p = first + turn;
        const float* from = p < last ? RowOf(a.gather, p) : nullptr;
        const float dot = G::Dot(grad, from != nullptr ? Row::Weights(from) : Columns{});
        if (p < last && G::lane() == 0) Store(a.out + p, from != nullptr ? dot * scale : 0.0f);
      }
    });
  }
};

}  // namespace tierstore::cuda
