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

TIERSTORE_DEVICE int64_t CountUsed(const int32_t* inverse, int64_t first, int64_t last) {
  int64_t used = 0;
  for (int64_t p = first; p < last; ++p) used += Load(inverse + p) >= 0;
  return used;
}

// A bag as kernels pool it.
struct PooledBag {
  int64_t first, last;  // positions
  int64_t out;
  uint8_t pooling;
};

TIERSTORE_DEVICE PooledBag BagOf(const BagsArgs& bags, int64_t bag) {
  const int64_t feature = FeatureOf(bags, bag);
  return {Load(bags.offsets + bag), Load(bags.offsets + bag + 1), OutputOf(bags, feature, bag),
          Load(bags.poolings + feature)};
}

// What thread `lane` of the warp has. All threads of the warp must call it.
TIERSTORE_DEVICE PooledBag FromThread(const PooledBag& bag, int lane) {
  return {ShuffleFrom(bag.first, lane), ShuffleFrom(bag.last, lane), ShuffleFrom(bag.out, lane),
          static_cast<uint8_t>(ShuffleFrom(static_cast<int>(bag.pooling), lane))};
}

TIERSTORE_DEVICE int32_t SlotOf(const GatherArgs& gather, int64_t position, int64_t end) {
  const int32_t u = position < end ? Load(gather.inverse + position) : -1;
  return u >= 0 ? Load(gather.slots + u) : -1;
}

template <int kDim, int kVec, int kType>
struct Lookup {
  using G = Group<kDim, kVec>;
  using Row = TypedRow<kDim, kVec, kType>;
  using Columns = typename G::Columns;
  static constexpr int kBlocks = G::kWords * kVec <= 4 ? 3 : 2;  // whose registers must fit a multiprocessor
  static constexpr int kBagsOfGroup = G::kLanes < 8 ? G::kLanes : 8;  // where bags are short

  // Rows of some positions, which are read at once: first all indices, then all slots, then all rows.
  template <int kCount, Hint kHint>
  struct RowsAtOnce {
    int32_t slots[kCount];  // -1: the position has no row
    typename Row::Packed rows[kCount];

    // Of positions first, first + apart ... below `end`.
    TIERSTORE_DEVICE RowsAtOnce(const GatherArgs& gather, int64_t first, int64_t end, int apart) {
      TIERSTORE_UNROLL
      for (int k = 0; k < kCount; ++k)
        slots[k] = first + k * apart < end ? Load(gather.inverse + first + k * apart) : -1;
      TIERSTORE_UNROLL
      for (int k = 0; k < kCount; ++k) slots[k] = slots[k] >= 0 ? Load(gather.slots + slots[k]) : -1;
      Read(gather.rows);
    }
    // Of slots that are known.
    TIERSTORE_DEVICE RowsAtOnce(const RowsArgs& from, const int32_t (&known)[kCount]) {
      TIERSTORE_UNROLL
      for (int k = 0; k < kCount; ++k) slots[k] = known[k];
      Read(from);
    }

   private:
    TIERSTORE_DEVICE void Read(const RowsArgs& from) {
      TIERSTORE_UNROLL
      for (int k = 0; k < kCount; ++k) {
        rows[k] = {};
        if (slots[k] >= 0) rows[k] = Row::template Read<kHint>(from.weights + slots[k] * from.weight_floats);
      }
    }
  };

  static TIERSTORE_DEVICE Columns Sum(const LookupPooledArgs& a, int64_t first, int64_t last, bool mean) {
    constexpr int kAhead = G::AtOnce(8);
    Columns sums = {};
    int64_t used = 0;
    for (int64_t p = first; p < last; p += kAhead) {
      RowsAtOnce<kAhead, kReadOnly> at(a.gather, p, last, 1);
      TIERSTORE_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        if (at.slots[k] < 0) continue;
        ++used;
        Columns row = Row::Widened(at.rows[k]);
        if (a.weights != nullptr) {
          const float weight = Load(a.weights + p + k);
          G::ForEach([=](float& x) { x *= weight; }, row);
        }
        G::ForEach([](float& sum, const float& x) { sum += x; }, sums, row);
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
      const int32_t slot = SlotOf(a.gather, p, last);
      if (slot < 0) continue;
      const Columns row = Row::Widened(Row::Read(a.gather.rows.weights + slot * a.gather.rows.weight_floats));
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
    if (a.argmax != nullptr) {
      SetArgmax(a.argmax + bag * kDim, [&](int i, int j) { return where[i][j]; });
    }
    return best;
  }

  template <typename Where>
  static TIERSTORE_DEVICE void SetArgmax(int32_t* to, const Where& where) {
    TIERSTORE_UNROLL
    for (int i = 0; i < G::kWords; ++i) {
      if (!G::Has(i)) continue;
      TIERSTORE_UNROLL
      for (int j = 0; j < kVec; ++j) Store(to + (i * G::kLanes + G::lane()) * kVec + j, where(i, j));
    }
  }

  // Bags with a position at most: the group's bag k from `begin` on is that of its thread k. What a sum, a
  // mean and a maximum make of one row are the same bits, with the zero that a sum begins with. All threads
  // of the warp must call it.
  static TIERSTORE_DEVICE void PoolShort(const LookupPooledArgs& a, int64_t begin, const PooledBag& mine) {
    constexpr int kAtOnce = G::AtOnce(kBagsOfGroup);
    const int32_t my_slot = SlotOf(a.gather, mine.first, mine.last);
    const float my_weight = a.weights != nullptr && my_slot >= 0 ? Load(a.weights + mine.first) : 1.0f;
    const int32_t none = mine.pooling == kMax ? -1 : -2;
    const int32_t my_max = mine.pooling == kMax && my_slot >= 0 ? static_cast<int32_t>(mine.first) : none;
    for (int k = 0; k < kBagsOfGroup; k += kAtOnce) {
      int32_t slots[kAtOnce];
      TIERSTORE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) slots[i] = ShuffleFrom(my_slot, G::first() + k + i);
      RowsAtOnce<kAtOnce, kCached> at(a.gather.rows, slots);  // rows repeat
      TIERSTORE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int from = G::first() + k + i;
        const int32_t max = ShuffleFrom(my_max, from);
        const int64_t out = ShuffleFrom(mine.out, from);
        Columns row = Row::Widened(at.rows[i]);
        if (a.weights != nullptr) {
          const float weight = ShuffleFrom(my_weight, from);
          if (max == -2 && slots[i] >= 0) G::ForEach([=](float& x) { x *= weight; }, row);
        }
        if (max == -2) G::ForEach([](float& x) { x = 0.0f + x; }, row);
        if (begin + k + i >= a.bags.num_bags) continue;
        if (max != -2 && a.argmax != nullptr)
          SetArgmax(a.argmax + (begin + k + i) * kDim, [=](int, int) { return max; });
        G::template Write<kVec, kStreamed>(a.out + out, row);
      }
    }
  }

  // A group pools a bag, or kBagsOfGroup neighbours. Then each of its threads looks at one of them first, and
  // if all bags of the warp have a position at most, their rows are read at once.
  static TIERSTORE_DEVICE void Pooled(const LookupPooledArgs& a) {
    const int run = a.are_short != 0 ? kBagsOfGroup : 1;
    ForItems<G::kLanes>((a.bags.num_bags + run - 1) / run, [&](int64_t item, bool inside) {
      const int64_t begin = item * run, looked = begin + G::lane() % run;
      PooledBag mine = {};
      if (inside && looked < a.bags.num_bags) mine = BagOf(a.bags, looked);
      if (run > 1 && MostOfWarp(mine.last - mine.first) <= 1) return PoolShort(a, begin, mine);
      for (int k = 0; k < run; ++k) {
        const PooledBag bag = run > 1 ? FromThread(mine, G::first() + k) : mine;
        if (!inside || begin + k >= a.bags.num_bags) continue;
        const Columns pooled = bag.pooling == kMax ? Max(a, bag.first, bag.last, begin + k)
                                                   : Sum(a, bag.first, bag.last, bag.pooling == kMean);
        G::template Write<kVec, kStreamed>(a.out + bag.out, pooled);
      }
    });
  }

  static TIERSTORE_DEVICE void Rows(const LookupRowsArgs& a) {
    constexpr int kItems = G::AtOnce(4), kApart = kWarp / G::kLanes;
    ForItems<G::kLanes, kItems>(a.n, [&](int64_t first, bool) {
      const RowsAtOnce<kItems, kReadOnly> at(a.gather, first, a.n, kApart);
      TIERSTORE_UNROLL
      for (int k = 0; k < kItems; ++k) {
        const int64_t position = first + k * kApart;
        if (position < a.n)
          G::template Write<kVec, kStreamed>(a.out + position * a.out_stride, Row::Widened(at.rows[k]));
      }
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
      const int64_t turns = MostOfWarp(last - first);
      for (int64_t turn = 0; turn < turns; ++turn) {
        const int64_t p = first + turn;
        const RowsAtOnce<1, kCached> at(a.gather, p, last, 1);
        const float dot = G::Dot(grad, Row::Widened(at.rows[0]));
        if (p < last && G::lane() == 0) Store(a.out + p, at.slots[0] >= 0 ? dot * scale : 0.0f);
      }
    });
  }
};

}  // namespace tierstore::cuda
