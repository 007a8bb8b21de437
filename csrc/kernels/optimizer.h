// Makes one optimizer step for one row, in place. `g` is the row's whole gradient of this step, summed over
// duplicates.
//
//   SGD             w -= lr * g
//   Momentum        m = b1 m + (1 - dampening) g, or m = g at step 1;       w -= lr * m
//   Nesterov        the same m;                                           w -= lr * (g + b1 m)
//   RowWiseAdagrad  s += mean over columns of g^2;        w -= lr / (sqrt(s) + eps) * g
//   Adagrad         s += g^2;                             w -= lr * g / (sqrt(s) + eps)
//   Adam            m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//                   w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//   PartialRowWiseAdam   Adam with v = b2 v + (1 - b2) * mean over columns of g^2, one per row
//   Lars            r = lr * |w| / (|g| + decay |w|);     m = b1 m + r * (g + decay w);  w -= m
//   Lamb            u = Adam's change of w without lr, + decay w;  w -= lr * |w| / |u| * u
//   PartialRowWiseLamb   Lamb with the v of PartialRowWiseAdam
//
// With weight decay of all rows (DecayingAll), the last float of a row's state is the number of the row's
// last update, 0 before the first. An update, number t, first multiplies w by keep^(t - last - 1), which is
// decoupled decay for the updates that the row was not part of.
//
// Before an update the gradient may be clipped as torch clips gradients, first by value and then by norm:
//
//   clip_value      every g becomes min(max(g, -clip_value), clip_value)
//   clip_norm       g *= min(1, clip_norm / (|g| + 1e-6))
//
// There are two modes of weight decay: kL2 adds weight_decay * w to g first; kDecoupled multiplies w by 1 -
// lr
// * weight_decay in the update. Lars and Lamb have a decay of their own, as above; |x| is the norm of the
// row, and a quotient of norms is 1 where one of them is 0. In all other respects the optimizers are
// fbgemm's, whose Adam decays decoupled, and SGD with momentum is torch's.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/vec.h"

namespace tierstore {

enum class OptimizerKind : int {
  kSgd = 0,
  kRowWiseAdagrad = 1,
  kAdagrad = 2,
  kAdam = 3,
  kMomentum = 4,
  kNesterov = 5,
  kLars = 6,
  kLamb = 7,
  kPartialRowWiseAdam = 8,
  kPartialRowWiseLamb = 9,
};
enum class WeightDecayMode : int { kNone = 0, kL2 = 1, kDecoupled = 2 };

// OptimizerStep holds the hyperparameters of one step, and values that follow from the hyperparameters alone,
// computed in double precision.
struct OptimizerStep {
  OptimizerKind kind;
  float lr;
  float eps;
  float l2;     // weight decay that is added to the gradient
  float keep;   // factor of the weights: 1 - lr * weight_decay when decoupled
  float decay;  // weight decay of Lars and Lamb
  float beta1, beta2;
  float rest1, rest2;     // factors of the gradient and of its square: 1 - beta, or 1 - dampening
  float adam_lr;          // lr / (1 - beta1^step), without lr for Lamb
  float adam_inv_sqrt_v;  // 1 / sqrt(1 - beta2^step)
  std::int64_t number;    // counts from 1
  float clip_value = std::numeric_limits<float>::infinity();  // infinity: not clipped
  float clip_norm = std::numeric_limits<float>::infinity();
  bool decays_all = false;   // whether rows decay for updates that they were not part of
  double keep_missed = 1.0;  // factor of the weights for each of these updates

  // `step` is the step's number, which matters to Momentum, to kinds with bias correction such as Adam, and
  // to stochastic rounding. For Momentum, beta1 is the momentum and beta2 the dampening; for Lars, beta1 is
  // the momentum. Throws std::invalid_argument for an unknown kind or mode and step < 1.
  static OptimizerStep Make(int kind, double lr, double eps, double weight_decay, int weight_decay_mode,
                            double beta1, double beta2, std::int64_t step);
  // Returns the same step of clipped gradients; infinity does not clip. Throws std::invalid_argument unless
  // both limits are above 0.
  OptimizerStep Clipped(double norm, double value) const;
  // Returns the same step, with weight decay of all rows.
  OptimizerStep DecayingAll(double keep_missed) const;
  std::int64_t StateFloats(std::int64_t dim) const;
  // Returns whether loops over columns are compiled for the usual dimensions. For all optimizers such loops
  // would be megabytes of code.
  bool IsUsual() const { return kind <= OptimizerKind::kAdam; }
};

// Returns keep^(number - last - 1), by squaring, so that every compiler gives the same bits. Returns 1 if no
// update was missed, and if `last` is no earlier update, as for a row from a training with more updates.
TIERSTORE_INLINE float KeepMissed(double keep, std::int64_t number, float last) {
  if (!(last >= 0.0f && last < static_cast<float>(number))) return 1.0f;
  double factor = 1.0;
  for (std::int64_t left = number - static_cast<std::int64_t>(last) - 1; left > 0; left /= 2) {
    if (left % 2 != 0) factor *= keep;
    keep *= keep;
  }
  return static_cast<float>(factor);
}

// Calls body(g, w, column) for every vector of columns: g and w are loaded before the call, and w is stored
// after the call.
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

TIERSTORE_INLINE void DecayMissed(const OptimizerStep& step, std::int64_t dim, float* w, float* state) {
  if (!step.decays_all) return;
  float& last = state[step.StateFloats(dim) - 1];
  const float factor = KeepMissed(step.keep_missed, step.number, last);
  last = static_cast<float>(step.number);
  for (std::int64_t c = 0; c < dim; ++c) w[c] *= factor;
}

// Clips the gradient by value; NaN stays NaN.
TIERSTORE_INLINE void ClipValues(const OptimizerStep& step, std::int64_t dim, float* g) {
  const float most = step.clip_value;
  if (most == std::numeric_limits<float>::infinity()) return;
  for (std::int64_t c = 0; c < dim; ++c) g[c] = g[c] > most ? most : (g[c] < -most ? -most : g[c]);
}

// Adds l2 weight decay to the gradient.
TIERSTORE_INLINE void AddDecay(const OptimizerStep& step, std::int64_t dim, float* g, const float* w) {
  if (step.l2 == 0.0f) return;
  for (std::int64_t c = 0; c < dim; ++c) g[c] += step.l2 * w[c];
}

template <int W>
TIERSTORE_INLINE float Norm(const float* x, std::int64_t dim) {
  return std::sqrt(Dot<W>(x, x, dim));
}

template <int W>
TIERSTORE_INLINE void ClipNorm(const OptimizerStep& step, std::int64_t dim, float* g) {
  if (step.clip_norm == std::numeric_limits<float>::infinity()) return;
  const float factor = step.clip_norm / (Norm<W>(g, dim) + 1e-6f);
  if (!(factor < 1.0f)) return;
  for (std::int64_t c = 0; c < dim; ++c) g[c] *= factor;
}

// Returns the quotient of two norms, 1 where one of them is 0.
TIERSTORE_INLINE float NormRatio(float above, float below) {
  return above > 0.0f && below > 0.0f ? above / below : 1.0f;
}

// Sets w = keep * w - rate * g.
template <int W>
TIERSTORE_INLINE void Descend(float keep, float rate, std::int64_t dim, const float* g, float* w) {
  ForWeights<W>(dim, g, w,
                [&](auto, auto& gradient, auto& weight, std::int64_t)
                    __attribute__((always_inline)) { weight = keep * weight - rate * gradient; });
}

template <int W>
TIERSTORE_INLINE void StepOfMomentum(const OptimizerStep& step, std::int64_t dim, const float* g, float* w,
                                     float* state) {
  const bool looks_ahead = step.kind == OptimizerKind::kNesterov;
  ForWeights<W>(dim, g, w,
                [&](auto block, auto& gradient, auto& weight, std::int64_t c) __attribute__((always_inline)) {
                  typename VecTypes<decltype(block)::kLanes>::Float m;
                  Load(m, state + c);
                  m = step.beta1 * m + step.rest1 * gradient;
                  Store(state + c, m);
                  if (looks_ahead) m = gradient + step.beta1 * m;
                  weight = step.keep * weight - step.lr * m;
                });
}

template <int W>
TIERSTORE_INLINE void StepOfLars(const OptimizerStep& step, std::int64_t dim, const float* g, float* w,
                                 float* state) {
  const float weights = Norm<W>(w, dim);
  const float rate = step.lr * NormRatio(weights, Norm<W>(g, dim) + step.decay * weights);
  ForWeights<W>(dim, g, w,
                [&](auto block, auto& gradient, auto& weight, std::int64_t c) __attribute__((always_inline)) {
                  typename VecTypes<decltype(block)::kLanes>::Float m;
                  Load(m, state + c);
                  m = step.beta1 * m + rate * (gradient + step.decay * weight);
                  Store(state + c, m);
                  weight = weight - m;
                });
}

template <int W>
TIERSTORE_INLINE void StepOfLamb(const OptimizerStep& step, std::int64_t dim, float* g, float* w,
                                 float* state) {
  ForWeights<W>(dim, g, w,
                [&](auto block, auto& gradient, auto& weight, std::int64_t c) __attribute__((always_inline)) {
                  constexpr int kLanes = decltype(block)::kLanes;
                  typename VecTypes<kLanes>::Float m, v;
                  Load(m, state + c);
                  Load(v, state + dim + c);
                  m = step.beta1 * m + step.rest1 * gradient;
                  v = step.beta2 * v + step.rest2 * (gradient * gradient);
                  Store(state + c, m);
                  Store(state + dim + c, v);
                  Store(g + c, step.adam_lr * m / (Sqrt<kLanes>(v) * step.adam_inv_sqrt_v + step.eps) +
                                   step.decay * weight);
                });
  Descend<W>(1.0f, step.lr * NormRatio(Norm<W>(w, dim), Norm<W>(g, dim)), dim, g, w);
}

template <int W>
TIERSTORE_INLINE void StepOfPartialRowWise(const OptimizerStep& step, std::int64_t dim, float* g, float* w,
                                           float* state, float mean_square) {
  state[dim] = step.beta2 * state[dim] + step.rest2 * mean_square;
  const float rate = step.adam_lr / (std::sqrt(state[dim]) * step.adam_inv_sqrt_v + step.eps);
  const bool is_lamb = step.kind == OptimizerKind::kPartialRowWiseLamb;
  ForWeights<W>(dim, g, w,
                [&](auto block, auto& gradient, auto& weight, std::int64_t c) __attribute__((always_inline)) {
                  typename VecTypes<decltype(block)::kLanes>::Float m;
                  Load(m, state + c);
                  m = step.beta1 * m + step.rest1 * gradient;
                  Store(state + c, m);
                  if (is_lamb) return Store(g + c, rate * m + step.decay * weight);
                  weight = step.keep * weight - rate * m;
                });
  if (is_lamb) Descend<W>(1.0f, step.lr * NormRatio(Norm<W>(w, dim), Norm<W>(g, dim)), dim, g, w);
}

template <int W>
TIERSTORE_INLINE void StepOfAdagrad(const OptimizerStep& step, std::int64_t dim, const float* g, float* w,
                                    float* state) {
  ForWeights<W>(dim, g, w,
                [&](auto block, auto& gradient, auto& weight, std::int64_t c) __attribute__((always_inline)) {
                  constexpr int kLanes = decltype(block)::kLanes;
                  typename VecTypes<kLanes>::Float sum;
                  Load(sum, state + c);
                  sum += gradient * gradient;
                  Store(state + c, sum);
                  weight = step.keep * weight - step.lr * gradient / (Sqrt<kLanes>(sum) + step.eps);
                });
}

template <int W>
TIERSTORE_INLINE void StepOfAdam(const OptimizerStep& step, std::int64_t dim, const float* g, float* w,
                                 float* state) {
  ForWeights<W>(dim, g, w,
                [&](auto block, auto& gradient, auto& weight, std::int64_t c) __attribute__((always_inline)) {
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
}

// Applies `step` to a row: w[dim] and its state. Overwrites g. Where the columns here are only some of the
// row's columns, `mean_square` is the mean square of the whole row's gradient; null means that the row is
// whole. Only RowWiseAdagrad and PartialRowWiseAdam use the mean square. kUsual is step.IsUsual().
template <int W, bool kUsual>
TIERSTORE_INLINE void ApplyStep(const OptimizerStep& step, std::int64_t dim, float* g, float* w, float* state,
                                const float* mean_square) {
  DecayMissed(step, dim, w, state);
  ClipValues(step, dim, g);
  ClipNorm<W>(step, dim, g);
  AddDecay(step, dim, g, w);
  const auto square = [&]() __attribute__((always_inline)) {
    return mean_square != nullptr ? *mean_square : Dot<W>(g, g, dim) / static_cast<float>(dim);
  };
  if constexpr (kUsual) {
    switch (step.kind) {
      case OptimizerKind::kSgd:
        return Descend<W>(step.keep, step.lr, dim, g, w);
      case OptimizerKind::kRowWiseAdagrad:
        state[0] += square();
        return Descend<W>(step.keep, step.lr / (std::sqrt(state[0]) + step.eps), dim, g, w);
      case OptimizerKind::kAdagrad:
        return StepOfAdagrad<W>(step, dim, g, w, state);
      default:
        return StepOfAdam<W>(step, dim, g, w, state);
    }
  } else {
    switch (step.kind) {
      case OptimizerKind::kMomentum:
      case OptimizerKind::kNesterov:
        return StepOfMomentum<W>(step, dim, g, w, state);
      case OptimizerKind::kLars:
        return StepOfLars<W>(step, dim, g, w, state);
      case OptimizerKind::kLamb:
        return StepOfLamb<W>(step, dim, g, w, state);
      default:
        return StepOfPartialRowWise<W>(step, dim, g, w, state, square());
    }
  }
}

}  // namespace tierstore
