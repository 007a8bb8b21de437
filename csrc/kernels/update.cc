#include "kernels/update.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "kernels/update_kernels.h"

namespace tierstore {
namespace {

using update::BagSource;
using update::Common;
using update::HotPiecesKernel;
using update::HotRow;
using update::Rejected;
using update::RowSource;
using update::Share;
using update::UpdateRunner;

constexpr std::int64_t kPieceBytes = 128 << 10;

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
  WithWeights(t.rows.weights,
              [&](auto type) { UpdateRunner<decltype(type)>::ColdRows(common, source, grain); });

  if (num_positions > kReducePositions) {
    const std::vector<HotRow> hot = HotRows(common);
    const auto num_hot = static_cast<std::int64_t>(hot.size()) - 1;
    const std::int64_t pieces = hot.back().first_piece;
    const std::unique_ptr<float[]> partials(new float[pieces * t.dim]);
    RunKernel<HotPiecesKernel<Source>>({common, source, hot.data(), num_hot, partials.get()}, 0, pieces, 1);
    WithWeights(t.rows.weights,
                [&](auto type) { UpdateRunner<decltype(type)>::HotRows(common, hot, partials.get()); });
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
  if (!inside) throw std::invalid_argument("csr_positions has an entry that is no position of the batch");
}

// Returns which positions of a batch are in csr_positions; empty when all are.
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
    throw std::invalid_argument("max pooling needs the argmax of the forward pass");

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
