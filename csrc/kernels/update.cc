#include "kernels/update.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "common/key.h"
#include "kernels/weights.h"

namespace tierstore {
namespace {

constexpr std::int64_t kPrefetchPositions = 12;
constexpr std::int64_t kPieceBytes = 128 << 10;

// A position's share of the gradient: scale * grad, or where argmax is p if argmax is set.
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

// g = sum of the shares of `count` positions, in order.
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

// `floats`: bytes of the row that are used, over 4.
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

// Unique rows that were not updated, collected from all threads.
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

  // `room`: for the row's weights as float32.
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

// A row with more positions: its partial sums are partials[first_piece ...], one row of `dim` floats each.
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

std::vector<HotRow> HotRows(const Common& common) {
  std::vector<HotRow> hot;
  std::int64_t pieces = 0;
  for (std::int64_t u = 0; u < common.touched.num_slots; ++u) {
    if (common.Count(u) <= kReducePositions) continue;
    hot.push_back({u, pieces});
    pieces += (common.Count(u) + kReducePositions - 1) / kReducePositions;
  }
  hot.push_back({common.touched.num_slots, pieces});
  return hot;
}

template <typename Source>
std::vector<std::int32_t> Update(const Touched& t, const Source& source, const OptimizerStep& step,
                                 bool check_finite, RowSquares squares) {
  Rejected rejected;
  const Common common{t, step, check_finite, squares, &rejected};
  const std::int64_t num_positions = t.csr_start[t.num_slots];
  const std::int64_t bytes = t.num_slots * t.rows.row_bytes + num_positions * t.dim * 4;
  const std::int64_t grain =
      std::max<std::int64_t>(1, kPieceBytes * t.num_slots / std::max<std::int64_t>(1, bytes));
  WithWeights(t.rows.weights, [&](auto type) {
    RunKernel<ColdRowsKernel<Source, decltype(type)>>({common, source}, 0, t.num_slots, grain);
  });

  if (num_positions > kReducePositions) {
    const std::vector<HotRow> hot = HotRows(common);
    const auto num_hot = static_cast<std::int64_t>(hot.size()) - 1;
    const std::int64_t pieces = hot.back().first_piece;
    const std::unique_ptr<float[]> partials(new float[pieces * t.dim]);
    RunKernel<HotPiecesKernel<Source>>({common, source, hot.data(), num_hot, partials.get()}, 0, pieces, 1);
    WithWeights(t.rows.weights, [&](auto type) {
      RunKernel<HotApplyKernel<decltype(type)>>({common, hot.data(), partials.get()}, 0, num_hot, 1);
    });
  }
  return rejected.Sorted();
}

void CheckTouched(const Touched& t, std::int64_t num_positions) {
  if (t.csr_start[0] != 0) throw std::invalid_argument("csr_start must start at 0");
  bool ascends = true;
  for (std::int64_t u = 0; u < t.num_slots; ++u) ascends &= t.csr_start[u] <= t.csr_start[u + 1];
  if (!ascends) throw std::invalid_argument("csr_start must not decrease");
  bool inside = true;
  for (std::int64_t k = 0; k < t.csr_start[t.num_slots]; ++k) {
    inside &= t.csr_positions[k] >= 0 && t.csr_positions[k] < num_positions;
  }
  if (!inside) throw std::invalid_argument("csr_positions has an entry outside of the positions");
}

// Which positions of a batch are in csr_positions; empty when all are.
std::vector<std::uint8_t> UsedPositions(const Touched& t, std::int64_t num_positions) {
  if (t.csr_start[t.num_slots] == num_positions) return {};
  std::vector<std::uint8_t> used(num_positions, 0);
  for (std::int64_t k = 0; k < t.csr_start[t.num_slots]; ++k) used[t.csr_positions[k]] = 1;
  return used;
}

}  // namespace

std::vector<std::int32_t> UpdatePooled(const Touched& touched, const PooledGrads& grads,
                                       const OptimizerStep& step, bool check_finite, RowSquares squares) {
  const Bags& bags = grads.bags;
  bags.Check();
  const std::int64_t n = bags.num_positions();
  CheckTouched(touched, n);
  const bool has_max = std::find(bags.poolings, bags.poolings + bags.num_features, Pooling::kMax) !=
                       bags.poolings + bags.num_features;
  if (has_max && grads.argmax == nullptr)
    throw std::invalid_argument("max pooling needs the forward's argmax");

  const std::vector<std::uint8_t> used = UsedPositions(touched, n);
  const std::unique_ptr<std::int32_t[]> bag_of(new std::int32_t[n]);
  const std::unique_ptr<Share[]> info(new Share[bags.num_bags]);
  ParallelFor(0, bags.num_bags, BagGrain(bags, 4096), [&](std::int64_t begin, std::int64_t end) {
    FeatureCursor feature(bags, begin);
    for (std::int64_t bag = begin; bag < end; ++bag) {
      feature.MoveTo(bag);
      const std::int64_t first = bags.offsets[bag], last = bags.offsets[bag + 1];
      std::fill(bag_of.get() + first, bag_of.get() + last, static_cast<std::int32_t>(bag));
      Share& to = info[bag];
      to.grad = grads.grad + feature.OutputOf(bag);
      to.argmax = feature.pooling() == Pooling::kMax ? grads.argmax + bag * touched.dim : nullptr;
      to.scale = 1.0f;
      if (feature.pooling() == Pooling::kMean && last > first) {
        const std::int64_t count =
            used.empty() ? last - first : std::count(used.begin() + first, used.begin() + last, 1);
        to.scale = 1.0f / static_cast<float>(count);
      }
    }
  });
  return Update(touched, BagSource{info.get(), bag_of.get(), grads.weights}, step, check_finite, squares);
}

std::vector<std::int32_t> UpdateRows(const Touched& touched, std::int64_t num_positions, const float* grad,
                                     std::int64_t stride, const OptimizerStep& step, bool check_finite,
                                     RowSquares squares) {
  CheckTouched(touched, num_positions);
  return Update(touched, RowSource{grad, stride}, step, check_finite, squares);
}

}  // namespace tierstore
