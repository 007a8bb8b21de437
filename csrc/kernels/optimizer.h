// One optimizer step for one row, in place. `g` is the row's whole gradient of this step, summed over
// duplicates.
//
//   SGD             w -= lr * g
//   RowWiseAdagrad  s += mean over columns of g^2;        w -= lr / (sqrt(s) + eps) * g
//   Adagrad         s += g^2;                             w -= lr * g / (sqrt(s) + eps)
//   Adam            m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//                   w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// Weight decay: kL2 adds weight_decay * w to g first; kDecoupled multiplies w by 1 - lr * weight_decay in the
// update. These are the semantics of fbgemm's EXACT_* optimizers (whose Adam decays decoupled).
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/vec.h"

namespace tierstore {

enum class OptimizerKind : int { kSgd = 0, kRowWiseAdagrad = 1, kAdagrad = 2, kAdam = 3 };
enum class WeightDecayMode : int { kNone = 0, kL2 = 1, kDecoupled = 2 };

// Hyperparameters of one step, with values that depend on them alone computed in double precision.
struct OptimizerStep {
  OptimizerKind kind;
  float lr;
  float eps;
  float l2;    // weight decay that is added to the gradient
  float keep;  // factor of the weights: 1 - lr * weight_decay when decoupled
  float beta1, beta2;
  float rest1, rest2;     // 1 - beta
  float adam_lr;          // lr / (1 - beta1^step)
  float adam_inv_sqrt_v;  // 1 / sqrt(1 - beta2^step)
  std::int64_t number;    // counts from 1

  // `step`: its number, which matters to Adam and to stochastic rounding. Throws std::invalid_argument for an
  // unknown kind or mode and step < 1.
  static OptimizerStep Make(int kind, double lr, double eps, double weight_decay, int weight_decay_mode,
                            double beta1, double beta2, std::int64_t step);
  std::int64_t StateFloats(std::int64_t dim) const;
};

// body(g, w, column) for every vector of columns; g and w are loaded before and w is stored after it.
template <int W, typename Body>
TIERSTORE_INLINE void ForWeights(std::int64_t dim, const float* g, float* w, const Body& body) {
  ForColumns<W>(dim, [&](auto block, std::int64_t first) __attribute__((always_inline)) {
    using B = decltype(block);
    using V = typename VecTypes<B::kLanes>::Float;
    for (int i = 0; i < B::kVectors; ++i) {
      const std::int64_t c = first + i * B::kLanes;
      V gradient, weight;
      Load(gradient, g + c);
      Load(weight, w + c);
      body(block, gradient, weight, c);
      Store(w + c, weight);
    }
  });
}

// Adds l2 weight decay to the gradient.
TIERSTORE_INLINE void AddDecay(const OptimizerStep& step, std::int64_t dim, float* g, const float* w) {
  if (step.l2 == 0.0f) return;
  for (std::int64_t c = 0; c < dim; ++c) g[c] += step.l2 * w[c];
}

// Applies `step` to a row: w[dim] and its state. Overwrites g. `mean_square`: of the whole row's gradient,
// where the columns here are only some of the row's; null: the row is whole. It matters to RowWiseAdagrad
// only.
template <int W>
TIERSTORE_INLINE void ApplyStep(const OptimizerStep& step, std::int64_t dim, float* g, float* w, float* state,
                                const float* mean_square) {
  AddDecay(step, dim, g, w);
  switch (step.kind) {
    case OptimizerKind::kSgd:
      ForWeights<W>(dim, g, w,
                    [&](auto, auto& gradient, auto& weight, std::int64_t)
                        __attribute__((always_inline)) { weight = step.keep * weight - step.lr * gradient; });
      break;
    case OptimizerKind::kRowWiseAdagrad: {
      state[0] += mean_square != nullptr ? *mean_square : Dot<W>(g, g, dim) / static_cast<float>(dim);
      const float rate = step.lr / (std::sqrt(state[0]) + step.eps);
      ForWeights<W>(dim, g, w,
                    [&](auto, auto& gradient, auto& weight, std::int64_t)
                        __attribute__((always_inline)) { weight = step.keep * weight - rate * gradient; });
      break;
    }
    case OptimizerKind::kAdagrad:
      ForWeights<W>(dim, g, w,
                    [&](auto block, auto& gradient, auto& weight, std::int64_t c)
                        __attribute__((always_inline)) {
                          constexpr int kLanes = decltype(block)::kLanes;
                          typename VecTypes<kLanes>::Float sum;
                          Load(sum, state + c);
                          sum += gradient * gradient;
                          Store(state + c, sum);
                          weight = step.keep * weight - step.lr * gradient / (Sqrt<kLanes>(sum) + step.eps);
                        });
      break;
    case OptimizerKind::kAdam:
      ForWeights<W>(dim, g, w,
                    [&](auto block, auto& gradient, auto& weight, std::int64_t c)
                        __attribute__((always_inline)) {
                          constexpr int kLanes = decltype(block)::kLanes;
                          typename VecTypes<kLanes>::Float m, v;
                          Load(m, state + c);
                          Load(v, state + dim + c);
                          m = step.beta1 * m + step.rest1 * gradient;
                          v = step.beta2 * v + step.rest2 * (gradient * gradient);
                          Store(state + c, m);
                          Store(state + dim + c, v);
                          weight = step.keep * weight -
                                   step.adam_lr * m / (Sqrt<kLanes>(v) * step.adam_inv_sqrt_v + step.eps);
                        });
      break;
  }
}

}  // namespace tierstore
