// Defines the kernels of updates, by the type of the rows' weights and the source of the gradients. Each type
// is compiled in a file of its own, because one compiler would take minutes for all types.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "common/key.h"
#include "kernels/update.h"
#include "kernels/weights.h"

namespace tierstore::update {

inline constexpr std::int64_t kPrefetchPositions = 12;

// A position's share of the gradient is scale * grad; if argmax is set, only in columns whose argmax is p.
struct Share {
  const float* grad;
  const std::int32_t* argmax;
  float scale;
};

struct RowSource {
  const float* grad;
  std::int64_t stride;

  TIERSTORE_INLINE Share At(std::int32_t p) const { return {grad + p * stride, nullptr, 1.0f}; }
};

struct BagSource {
  const Share* bags;
  const std::int32_t* bag_of;  // per position
  const float* weights;

  TIERSTORE_INLINE Share At(std::int32_t p) const {
    const Share& bag = bags[bag_of[p]];
    const bool weighted = weights != nullptr && bag.argmax == nullptr;
    return {bag.grad, bag.argmax, weighted ? weights[p] * bag.scale : bag.scale};
  }
};

// Sets g to the sum of the shares of `count` positions, in order.
template <int W, typename Source>
TIERSTORE_INLINE void Reduce(const Source& source, const std::int32_t* positions, std::int64_t count,
                             const std::int32_t* positions_end, std::int64_t dim, float* g) {
  ForColumns<W>(dim, [&](auto block, std::int64_t c) __attribute__((always_inline)) {
    using B = decltype(block);
    using V = typename VecTypes<B::kLanes>::Float;
    using I = typename VecTypes<B::kLanes>::Int;
    V sums[B::kVectors] = {};
    for (const std::int32_t* p = positions; p < positions + count; ++p) {
      if (p + kPrefetchPositions < positions_end) {
        Prefetch<false>(source.At(p[kPrefetchPositions]).grad + c, 4 * B::kLanes * B::kVectors);
      }
      const Share share = source.At(*p);
      for (int i = 0; i < B::kVectors; ++i) {
        V x;
        Load(x, share.grad + c + i * B::kLanes);
        if (share.argmax != nullptr) {
          I where;
          Load(where, share.argmax + c + i * B::kLanes);
          x = where == *p ? x : V{};
        }
        sums[i] += share.scale * x;
      }
    }
    for (int i = 0; i < B::kVectors; ++i) Store(g + c + i * B::kLanes, sums[i]);
  });
}

// `floats` is a quarter of the row's used bytes.
TIERSTORE_INLINE void PrefetchRow(const std::uint8_t* row, std::int64_t floats) {
  ForColumns<16>(floats, [&](auto block, std::int64_t c) __attribute__((always_inline)) {
    using B = decltype(block);
    Prefetch<true>(row + 4 * c, 4 * B::kLanes * B::kVectors);
  });
}

TIERSTORE_INLINE bool AllFinite(const float* g, std::int64_t dim) {
  constexpr std::uint32_t kExponent = 0x7f800000;
  std::uint32_t bad = 0;
  for (std::int64_t c = 0; c < dim; ++c) {
    std::uint32_t bits;
    std::memcpy(&bits, g + c, sizeof bits);
    bad |= (bits & kExponent) == kExponent;
  }
  return bad == 0;
}

// Rejected collects the unique rows that were not updated, from all threads.
class Rejected {
 public:
  void Add(std::int64_t u) {
    std::lock_guard lock(mutex_);
    rows_.push_back(static_cast<std::int32_t>(u));
  }
  std::vector<std::int32_t> Sorted() {
    std::sort(rows_.begin(), rows_.end());
    return std::move(rows_);
  }

 private:
  std::mutex mutex_;
  std::vector<std::int32_t> rows_;
};

struct Common {
  Touched touched;
  OptimizerStep step;
  bool check_finite;
  RowSquares squares;
  Rejected* rejected;

  std::int64_t Count(std::int64_t u) const { return touched.csr_start[u + 1] - touched.csr_start[u]; }

  // `room` is for the row's weights as float32.
  template <int W, bool kUsual, typename Weights>
  TIERSTORE_INLINE void Apply(std::int64_t u, std::int64_t dim, float* g, float* room) const {
    std::uint8_t* row = touched.rows.At(touched.slots[u]);
    if (squares.out != nullptr) {
      squares.out[u] = std::numeric_limits<float>::quiet_NaN();
      if (!AllFinite(g, dim)) return;
      ClipValues(step, dim, g);
      AddDecay(step, dim, g, Weights::template Widen<W>(row, dim, room));
      squares.out[u] = Dot<W>(g, g, dim);
      return;
    }
    const float* mean = squares.means != nullptr ? squares.means + u : nullptr;
    if (check_finite && (!AllFinite(g, dim) || (mean != nullptr && std::isnan(*mean)))) {
      rejected->Add(u);
      return;
    }
    float* const weights = Weights::template Widen<W>(row, dim, room);
    float* const state = reinterpret_cast<float*>(row + StateBegin(Weights::kType, dim));
    ApplyStep<W, kUsual>(step, dim, g, weights, state, mean);
    if constexpr (Weights::kType != WeightType::kFloat32) Narrow<W, Weights>(u, dim, weights, row);
  }

  template <int W, typename Weights>
  TIERSTORE_INLINE void Narrow(std::int64_t u, std::int64_t dim, const float* weights,
                               std::uint8_t* row) const {
    const UpdateRounding& rounding = touched.rounding;
    if (rounding.keys == nullptr) return Weights::template Narrow<W, false>(weights, dim, 0, {}, row);
    const std::uint32_t table = KeyTable(rounding.keys[u]);
    const std::int64_t column = rounding.columns != nullptr ? rounding.columns[table] : 0;
    const Dice dice{KeyId(rounding.keys[u]), rounding.seeds[table],
                    static_cast<std::uint32_t>(step.number) * 2};
    Weights::template Narrow<W, true>(weights, dim, column, dice, row);
  }
};

// Updates the unique rows [begin, end) that have at most kReducePositions positions.
template <typename Source, typename Weights>
struct ColdRowsKernel {
  struct Args {
    Common common;
    Source source;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const std::int64_t dim = args.common.touched.dim;
    if (!args.common.step.IsUsual()) return Run<W, false>(args, dim, begin, end);
    WithDim(dim, [&](auto same) __attribute__((always_inline)) { Run<W, true>(args, same, begin, end); });
  }

  template <int W, bool kUsual>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t dim, std::int64_t begin, std::int64_t end) {
    const Touched& t = args.common.touched;
    const std::int32_t* positions_end = t.csr_positions + t.csr_start[t.num_slots];
    const std::int64_t row_floats = StateBegin(Weights::kType, dim) / 4 + args.common.step.StateFloats(dim);
    const std::int64_t ahead = PrefetchAhead(4 * row_floats);
    float* const g = Scratch(2 * dim);
    for (std::int64_t u = begin; u < end; ++u) {
      if (u + ahead < t.num_slots) PrefetchRow(t.rows.At(t.slots[u + ahead]), row_floats);
      const std::int64_t count = args.common.Count(u);
      if (count == 0 || count > kReducePositions) continue;
      Reduce<W>(args.source, t.csr_positions + t.csr_start[u], count, positions_end, dim, g);
      args.common.template Apply<W, kUsual, Weights>(u, dim, g, g + dim);
    }
  }
};

// A HotRow has more positions. Its partial sums are partials[first_piece ...], each of `dim` floats.
struct HotRow {
  std::int64_t u;
  std::int64_t first_piece;
};

template <typename Source>
struct HotPiecesKernel {
  struct Args {
    Common common;
    Source source;
    const HotRow* rows;  // ends with a sentinel
    std::int64_t num_rows;
    float* partials;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const Touched& t = args.common.touched;
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const HotRow* row = args.rows;
      for (const HotRow* last = row + args.num_rows; last - row > 1;) {
        const HotRow* middle = row + (last - row) / 2;
        (middle->first_piece <= piece ? row : last) = middle;
      }
      const std::int64_t skip = (piece - row->first_piece) * kReducePositions;
      const std::int32_t* positions = t.csr_positions + t.csr_start[row->u] + skip;
      const std::int64_t count = std::min(kReducePositions, args.common.Count(row->u) - skip);
      Reduce<W>(args.source, positions, count, positions + count, t.dim, args.partials + piece * t.dim);
    }
  }
};

template <typename Weights>
struct HotApplyKernel {
  struct Args {
    Common common;
    const HotRow* rows;  // ends with a sentinel
    float* partials;
  };

  template <int W>
  TIERSTORE_INLINE static void Run(const Args& args, std::int64_t begin, std::int64_t end) {
    const std::int64_t dim = args.common.touched.dim;
    for (std::int64_t i = begin; i < end; ++i) {
      float* g = args.partials + args.rows[i].first_piece * dim;
      const float* stop = args.partials + args.rows[i + 1].first_piece * dim;
      for (const float* partial = g + dim; partial < stop; partial += dim) {
        for (std::int64_t c = 0; c < dim; ++c) g[c] += partial[c];
      }
      if (args.common.step.IsUsual())
        args.common.template Apply<W, true, Weights>(args.rows[i].u, dim, g, Scratch(dim));
      else
        args.common.template Apply<W, false, Weights>(args.rows[i].u, dim, g, Scratch(dim));
    }
  }
};

// Runs the kernels for rows with weights of one type.
template <typename Weights>
struct UpdateRunner {
  static void ColdRows(const Common& common, const RowSource& source, std::int64_t grain);
  static void ColdRows(const Common& common, const BagSource& source, std::int64_t grain);
  // `hot` ends with a sentinel.
  static void HotRows(const Common& common, const std::vector<HotRow>& hot, float* partials);
};

template <typename Weights>
void UpdateRunner<Weights>::ColdRows(const Common& common, const RowSource& source, std::int64_t grain) {
  RunKernel<ColdRowsKernel<RowSource, Weights>>({common, source}, 0, common.touched.num_slots, grain);
}

template <typename Weights>
void UpdateRunner<Weights>::ColdRows(const Common& common, const BagSource& source, std::int64_t grain) {
  RunKernel<ColdRowsKernel<BagSource, Weights>>({common, source}, 0, common.touched.num_slots, grain);
}

template <typename Weights>
void UpdateRunner<Weights>::HotRows(const Common& common, const std::vector<HotRow>& hot, float* partials) {
  const auto num_hot = static_cast<std::int64_t>(hot.size()) - 1;
  RunKernel<HotApplyKernel<Weights>>({common, hot.data(), partials}, 0, num_hot, 1);
}

extern template struct UpdateRunner<FloatWeights>;
extern template struct UpdateRunner<ShortWeights<Bfloat16>>;
extern template struct UpdateRunner<ShortWeights<Half>>;

}  // namespace tierstore::update
