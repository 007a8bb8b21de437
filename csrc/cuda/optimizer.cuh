// One optimizer step for one row, as csrc/kernels/optimizer.h says, by the threads of a group.
#pragma once

#include "cuda/weights.cuh"

namespace tierstore::cuda {

enum OptimizerKind : int {
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

// kernels/optimizer.h.
TIERSTORE_DEVICE float KeepMissed(double keep, int64_t number, float last) {
  if (!(last >= 0.0f && last < static_cast<float>(number))) return 1.0f;
  double factor = 1.0;
  for (int64_t left = number - static_cast<int64_t>(last) - 1; left > 0; left /= 2) {
    if (left % 2 != 0) factor *= keep;
    keep *= keep;
  }
  return static_cast<float>(factor);
}

// Clips the gradient of a group's row. All threads of the warp must call it.
template <typename G>
TIERSTORE_DEVICE void ClipGradient(const StepArgs& s, typename G::Columns& g) {
  if (IsFinite(s.clip_value)) {
    const float most = s.clip_value;
    G::ForEach([=](float& x) { x = x > most ? most : (x < -most ? -most : x); }, g);
  }
  if (IsFinite(s.clip_norm)) {
    const float factor = s.clip_norm / (Sqrt(G::Dot(g, g)) + 1e-6f);
    if (factor < 1.0f) G::ForEach([=](float& x) { x *= factor; }, g);
  }
}

// The step of a group's row, whose state is at `state`. Where `updates` is false, nothing is written, but all
// threads of the warp must make the calls all the same, since sums over columns need them.
template <int kDim, int kVec, int kKind, int kType>
struct OptimizerOf {
  using G = Group<kDim, kVec>;
  using Row = TypedRow<kDim, kVec, kType>;
  using Columns = typename G::Columns;

  static constexpr bool kOnePerRow = kKind == kPartialRowWiseAdam || kKind == kPartialRowWiseLamb;
  // The floats of the state for each column, which come first. Behind them is one for the row, if the
  // optimizer has it, and then the number of the row's last update.
  static constexpr int kOfColumn = kKind == kSgd || kKind == kRowWiseAdagrad ? 0
                                   : kKind == kAdam || kKind == kLamb        ? 2
                                                                             : 1;
  static constexpr bool kHasOfRow = kKind == kRowWiseAdagrad || kOnePerRow;
  static constexpr int kOfRow = kOfColumn * kDim;
  static constexpr int kLast = kOfRow + (kHasOfRow ? 1 : 0);

  // A row's state. What is of the row is in the group's first thread, which alone reads and writes it.
  struct State {
    Columns of_column[kOfColumn == 0 ? 1 : kOfColumn];
    float of_row, last;
  };

  const StepArgs& s;
  float* state;
  bool updates;

  // Reads come before the gradients of the row are added: no step waits for its state then.
  static TIERSTORE_DEVICE State Read(const StepArgs& s, const float* state) {
    State read = {};
    TIERSTORE_UNROLL
    for (int i = 0; i < kOfColumn; ++i) read.of_column[i] = Row::State(state + i * kDim);
    if (G::lane() != 0) return read;
    if constexpr (kHasOfRow) read.of_row = Load(state + kOfRow);
    if (s.decays_all != 0) read.last = Load(state + kLast);
    return read;
  }

  // Decays the weights for the updates that the row was not part of.
  TIERSTORE_DEVICE void DecayMissed(const State& read, Columns& weight) const {
    if (s.decays_all == 0) return;
    const float factor = KeepMissed(s.keep_missed, s.number, G::FromFirst(read.last));
    SetOfRow(kLast, static_cast<float>(s.number));
    G::ForEach([=](float& w) { w *= factor; }, weight);
  }

  // `mean`: the mean square of the whole row's gradient, where `cut`, since the columns here are only some.
  // Changes g, the state, which it writes, and weight, which it does not.
  TIERSTORE_DEVICE void Apply(Columns& g, State& read, Columns& weight, bool cut, float mean) const {
    if constexpr (kKind == kSgd) {
      Descend(s.keep, s.lr, g, weight);
    } else if constexpr (kKind == kRowWiseAdagrad) {
      const float sum = G::FromFirst(read.of_row) + (cut ? mean : MeanSquare(g));
      Descend(s.keep, s.lr / (Sqrt(sum) + s.eps), g, weight);
      SetOfRow(kOfRow, sum);
    } else if constexpr (kKind == kAdagrad) {
      Adagrad(g, read.of_column[0], weight);
    } else if constexpr (kKind == kMomentum || kKind == kNesterov) {
      Momentum(g, read.of_column[0], weight);
    } else if constexpr (kKind == kLars) {
      Lars(g, read.of_column[0], weight);
    } else if constexpr (kKind == kAdam || kKind == kLamb) {
      Adam(g, read.of_column[0], read.of_column[1], weight);
    } else {
      PartialRowWise(g, read, weight, cut ? mean : MeanSquare(g));
    }
  }

 private:
  static TIERSTORE_DEVICE void Descend(float keep, float rate, const Columns& g, Columns& weight) {
    G::ForEach([=](float& w, const float& x) { w = keep * w - rate * x; }, weight, g);
  }
  static TIERSTORE_DEVICE float MeanSquare(const Columns& g) {
    return G::Dot(g, g) / static_cast<float>(kDim);
  }
  static TIERSTORE_DEVICE float Norm(const Columns& x) { return Sqrt(G::Dot(x, x)); }
  static TIERSTORE_DEVICE float NormRatio(float above, float below) {
    return above > 0.0f && below > 0.0f ? above / below : 1.0f;
  }

  // The last part of Lamb; g is the change of the weights without lr.
  TIERSTORE_DEVICE void DescendByNorms(Columns& g, Columns& weight) const {
    G::ClearRest(g);  // where eps is 0, it is 0 / 0
    Descend(1.0f, s.lr * NormRatio(Norm(weight), Norm(g)), g, weight);
  }

  TIERSTORE_DEVICE void SetOfRow(int at, float value) const {
    if (updates && G::lane() == 0) Store(state + at, value);
  }
  TIERSTORE_DEVICE void WriteState(int at, const Columns& columns) const {
    if (updates) Row::SetState(state + at, columns);
  }

  TIERSTORE_DEVICE void Adagrad(const Columns& g, Columns& sum, Columns& weight) const {
    G::ForEach(
        [&](float& w, float& sums, const float& x) {
          sums += x * x;
          w = s.keep * w - s.lr * x / (Sqrt(sums) + s.eps);
        },
        weight, sum, g);
    WriteState(0, sum);
  }

  TIERSTORE_DEVICE void Momentum(const Columns& g, Columns& m, Columns& weight) const {
    G::ForEach(
        [&](float& w, float& first, const float& x) {
          first = s.beta1 * first + s.rest1 * x;
          w = s.keep * w - s.lr * (kKind == kNesterov ? x + s.beta1 * first : first);
        },
        weight, m, g);
    WriteState(0, m);
  }

  TIERSTORE_DEVICE void Lars(const Columns& g, Columns& m, Columns& weight) const {
    const float weights = Norm(weight);
    const float rate = s.lr * NormRatio(weights, Norm(g) + s.decay * weights);
    G::ForEach(
        [&](float& w, float& first, const float& x) {
          first = s.beta1 * first + rate * (x + s.decay * w);
          w = w - first;
        },
        weight, m, g);
    WriteState(0, m);
  }

  TIERSTORE_DEVICE void Adam(Columns& g, Columns& m, Columns& v, Columns& weight) const {
    G::ForEach(
        [&](float& w, float& first, float& second, float& x) {
          first = s.beta1 * first + s.rest1 * x;
          second = s.beta2 * second + s.rest2 * (x * x);
          const float change = s.adam_lr * first / (Sqrt(second) * s.adam_inv_sqrt_v + s.eps);
          if constexpr (kKind == kLamb) {
            x = change + s.decay * w;
          } else {
            w = s.keep * w - change;
          }
        },
        weight, m, v, g);
    WriteState(0, m);
    WriteState(kDim, v);
    if constexpr (kKind == kLamb) DescendByNorms(g, weight);
  }

  TIERSTORE_DEVICE void PartialRowWise(Columns& g, State& read, Columns& weight, float mean_square) const {
    const float v = s.beta2 * G::FromFirst(read.of_row) + s.rest2 * mean_square;
    SetOfRow(kOfRow, v);
    const float rate = s.adam_lr / (Sqrt(v) * s.adam_inv_sqrt_v + s.eps);
    Columns& m = read.of_column[0];
    G::ForEach(
        [&](float& w, float& first, float& x) {
          first = s.beta1 * first + s.rest1 * x;
          if constexpr (kKind == kPartialRowWiseLamb) {
            x = rate * first + s.decay * w;
          } else {
            w = s.keep * w - rate * first;
          }
        },
        weight, m, g);
    WriteState(0, m);
    if constexpr (kKind == kPartialRowWiseLamb) DescendByNorms(g, weight);
  }
};

}  // namespace tierstore::cuda
