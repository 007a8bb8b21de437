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

// Hyperparameters of one step, with everything that depends on them alone worked out in double precision.
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

  // `step` counts from 1 and matters to Adam only. Throws std::invalid_argument for an unknown kind or mode
  // and step < 1.
  static OptimizerStep Make(int kind, double lr, double eps, double weight_decay, int weight_decay_mode,
                            double beta1, double beta2, std::int64_t step);
  std::int64_t StateFloats(std::int64_t dim) const;
};

// Applies `step` to a row: w[dim], followed by its state. Overwrites g.
template <int W>
TIERSTORE_INLINE void ApplyStep(const OptimizerStep& step, std::int64_t dim, float* __restrict g,
                                float* __restrict w) {
  float* __restrict state = w + dim;
  const float lr = step.lr, eps = step.eps, keep = step.keep;
  if (step.l2 != 0.0f) {
    const float l2 = step.l2;
    for (std::int64_t c = 0; c < dim; ++c) g[c] += l2 * w[c];
  }
  switch (step.kind) {
    case OptimizerKind::kSgd:
      for (std::int64_t c = 0; c < dim; ++c) w[c] = keep * w[c] - lr * g[c];
      break;
    case OptimizerKind::kRowWiseAdagrad: {
      state[0] += Dot<W>(g, g, dim) / static_cast<float>(dim);
      const float rate = lr / (std::sqrt(state[0]) + eps);
      for (std::int64_t c = 0; c < dim; ++c) w[c] = keep * w[c] - rate * g[c];
      break;
    }
    case OptimizerKind::kAdagrad:
      for (std::int64_t c = 0; c < dim; ++c) {
        state[c] += g[c] * g[c];
        w[c] = keep * w[c] - lr * g[c] / (std::sqrt(state[c]) + eps);
      }
      break;
    case OptimizerKind::kAdam: {
      float* __restrict v = state + dim;
      const float beta1 = step.beta1, beta2 = step.beta2, rest1 = step.rest1, rest2 = step.rest2;
      const float adam_lr = step.adam_lr, inv_sqrt_v = step.adam_inv_sqrt_v;
      for (std::int64_t c = 0; c < dim; ++c) {
        state[c] = beta1 * state[c] + rest1 * g[c];
        v[c] = beta2 * v[c] + rest2 * (g[c] * g[c]);
        w[c] = keep * w[c] - adam_lr * state[c] / (std::sqrt(v[c]) * inv_sqrt_v + eps);
      }
      break;
    }
  }
}

}  // namespace tierstore
