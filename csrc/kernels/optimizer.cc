#include "kernels/optimizer.h"

#include <cmath>
#include <stdexcept>

namespace tierstore {
namespace {

// Returns the number of floats of state, without the number of the last update.
std::int64_t OwnFloats(OptimizerKind kind, std::int64_t dim) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return 0;
    case OptimizerKind::kRowWiseAdagrad:
      return 1;
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kMomentum:
    case OptimizerKind::kNesterov:
    case OptimizerKind::kLars:
      return dim;
    case OptimizerKind::kPartialRowWiseAdam:
    case OptimizerKind::kPartialRowWiseLamb:
      return dim + 1;
    case OptimizerKind::kAdam:
    case OptimizerKind::kLamb:
      return 2 * dim;
  }
  return 0;
}

bool IsLamb(OptimizerKind kind) {
  return kind == OptimizerKind::kLamb || kind == OptimizerKind::kPartialRowWiseLamb;
}

void SetMoments(double lr, double beta1, double beta2, OptimizerStep* result) {
  const auto power = static_cast<double>(result->number);
  result->beta2 = static_cast<float>(beta2);
  result->rest1 = static_cast<float>(1.0 - beta1);
  result->rest2 = static_cast<float>(1.0 - beta2);
  const double rate = IsLamb(result->kind) ? 1.0 : lr;
  result->adam_lr = static_cast<float>(rate / (1.0 - std::pow(beta1, power)));
  result->adam_inv_sqrt_v = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, power)));
}

}  // namespace

OptimizerStep OptimizerStep::Make(int kind, double lr, double eps, double weight_decay, int weight_decay_mode,
                                  double beta1, double beta2, std::int64_t step) {
  if (kind < 0 || kind > static_cast<int>(OptimizerKind::kPartialRowWiseLamb)) {
    throw std::invalid_argument("optimizer kind must be one of kernels/optimizer.h, 0 to 9");
  }
  if (weight_decay_mode < 0 || weight_decay_mode > static_cast<int>(WeightDecayMode::kDecoupled)) {
    throw std::invalid_argument("weight_decay_mode must be 0 (none), 1 (L2) or 2 (decoupled)");
  }
  if (step < 1) throw std::invalid_argument("step must be at least 1");
  const auto mode = static_cast<WeightDecayMode>(weight_decay_mode);
  OptimizerStep result{};
  result.number = step;
  result.kind = static_cast<OptimizerKind>(kind);
  result.lr = static_cast<float>(lr);
  result.eps = static_cast<float>(eps);
  result.keep = 1.0f;
  result.beta1 = static_cast<float>(beta1);
  if (result.kind == OptimizerKind::kLars || IsLamb(result.kind)) {
    result.decay = static_cast<float>(weight_decay);
  } else if (mode == WeightDecayMode::kL2) {
    result.l2 = static_cast<float>(weight_decay);
  } else if (mode == WeightDecayMode::kDecoupled) {
    result.keep = static_cast<float>(1.0 - lr * weight_decay);
  }
  switch (result.kind) {
    case OptimizerKind::kMomentum:
    case OptimizerKind::kNesterov:
      result.rest1 = step == 1 ? 1.0f : static_cast<float>(1.0 - beta2);
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kLamb:
    case OptimizerKind::kPartialRowWiseAdam:
    case OptimizerKind::kPartialRowWiseLamb:
      SetMoments(lr, beta1, beta2, &result);
      break;
    default:
      break;
  }
  return result;
}

OptimizerStep OptimizerStep::Clipped(double norm, double value) const {
  if (!(norm > 0.0) || !(value > 0.0)) throw std::invalid_argument("limits of gradients must be above 0");
  OptimizerStep clipped = *this;
  clipped.clip_norm = static_cast<float>(norm);
  clipped.clip_value = static_cast<float>(value);
  return clipped;
}

OptimizerStep OptimizerStep::DecayingAll(double keep_missed) const {
  OptimizerStep decaying = *this;
  decaying.decays_all = true;
  decaying.keep_missed = keep_missed;
  return decaying;
}

std::int64_t OptimizerStep::StateFloats(std::int64_t dim) const {
  return OwnFloats(kind, dim) + (decays_all ? 1 : 0);
}

}  // namespace tierstore
