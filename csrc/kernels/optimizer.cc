#include "kernels/optimizer.h"

#include <cmath>
#include <stdexcept>

namespace tierstore {

OptimizerStep OptimizerStep::Make(int kind, double lr, double eps, double weight_decay, int weight_decay_mode,
                                  double beta1, double beta2, std::int64_t step) {
  if (kind < 0 || kind > static_cast<int>(OptimizerKind::kAdam)) {
    throw std::invalid_argument(
        "optimizer kind must be 0 (SGD), 1 (RowWiseAdagrad), 2 (Adagrad) or 3 (Adam)");
  }
  if (weight_decay_mode < 0 || weight_decay_mode > static_cast<int>(WeightDecayMode::kDecoupled)) {
    throw std::invalid_argument("weight_decay_mode must be 0 (none), 1 (L2) or 2 (decoupled)");
  }
  if (step < 1) throw std::invalid_argument("step counts from 1");
  const auto mode = static_cast<WeightDecayMode>(weight_decay_mode);
  OptimizerStep result{};
  result.number = step;
  result.kind = static_cast<OptimizerKind>(kind);
  result.lr = static_cast<float>(lr);
  result.eps = static_cast<float>(eps);
  result.l2 = mode == WeightDecayMode::kL2 ? static_cast<float>(weight_decay) : 0.0f;
  result.keep = mode == WeightDecayMode::kDecoupled ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f;
  if (result.kind == OptimizerKind::kAdam) {
    result.beta1 = static_cast<float>(beta1);
    result.beta2 = static_cast<float>(beta2);
    result.rest1 = static_cast<float>(1.0 - beta1);
    result.rest2 = static_cast<float>(1.0 - beta2);
    result.adam_lr = static_cast<float>(lr / (1.0 - std::pow(beta1, static_cast<double>(step))));
    result.adam_inv_sqrt_v =
        static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, static_cast<double>(step))));
  }
  return result;
}

std::int64_t OptimizerStep::StateFloats(std::int64_t dim) const {
  switch (kind) {
    case OptimizerKind::kSgd:
      return 0;
    case OptimizerKind::kRowWiseAdagrad:
      return 1;
    case OptimizerKind::kAdagrad:
      return dim;
    case OptimizerKind::kAdam:
      return 2 * dim;
  }
  return 0;
}

}  // namespace tierstore
