// Initial values of rows; kernels/init.h says what they are.
#pragma once

#include "cuda/weights.cuh"
#include "kernels/normal.h"

namespace tierstore::cuda {

enum : uint8_t { kConstant = 0, kUniform = 1, kNormal = 2 };

// The largest float below x.
TIERSTORE_DEVICE float Below(float x) {
  if (x == 0.0f) return FloatOf(0x80000001u);
  return FloatOf(x > 0.0f ? BitsOf(x) - 1 : BitsOf(x) + 1);
}

TIERSTORE_DEVICE float InitialValue(uint32_t bits, uint8_t kind, float a, float b) {
  if (kind == kUniform) {
    const float span = b - a, below = a < b ? Below(b) : a;
    const float value = a + static_cast<float>(static_cast<int32_t>(bits >> 8)) * 0x1p-24f * span;
    return value < below ? value : below;
  }
  const uint32_t one[1] = {bits};
  double number[1];
  NormalNumbers(one, number);
  return static_cast<float>(static_cast<double>(a) + static_cast<double>(b) * number[0]);
}

// Writes column c of a row, to the nearest value, and what lies between the last one and the state.
TIERSTORE_DEVICE void SetWeight(const InitRowsArgs& a, float* row, int64_t c, float value) {
  if (a.weights == kFloat32) return Store(row + c, value);
  uint16_t* const to = reinterpret_cast<uint16_t*>(row) + c;
  Store(to, ToShort(a.weights, value, {}, 0));
  if (c == a.dim - 1 && a.dim % 2 != 0) Store(to + 1, uint16_t{0});
}

// A thread has four columns of a row, which one counter gives, or four floats behind the weights.
TIERSTORE_DEVICE void InitRows(const InitRowsArgs& a) {
  const int64_t of_weights = (a.dim + 3 + 3) / 4, behind = (a.behind + 3) / 4;
  ForItems<1>(a.n * (of_weights + behind), [&](int64_t item, bool inside) {
    if (!inside) return;
    const int64_t i = item / (of_weights + behind), part = item - i * (of_weights + behind);
    const int64_t slot = a.slots != nullptr ? Load(a.slots + i) : i;
    float* const row = a.rows.weights + slot * a.rows.weight_floats;
    if (part >= of_weights) {
      float* const state = a.rows.state + slot * a.rows.state_floats;
      for (int64_t c = 4 * (part - of_weights), k = 0; k < 4 && c < a.behind; ++c, ++k)
        Store(state + c, c < a.state_floats ? a.state_value : 0.0f);
      return;
    }
    const uint64_t key = Load(a.keys + i), table = key >> 48, id = key & ((uint64_t{1} << 48) - 1);
    const uint8_t kind = Load(a.kinds + table);
    const float first = Load(a.first + table), second = Load(a.second + table);
    const int64_t column = a.columns != nullptr ? Load(a.columns + table) : 0, skip = column % 4;
    uint32_t words[4][1] = {};
    if (kind != kConstant) {
      Philox<1>(static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32),
                static_cast<uint32_t>((column - skip) / 4 + part), Load(a.seeds + table), words);
    }
    for (int k = 0; k < 4; ++k) {
      const int64_t c = 4 * part + k - skip;
      if (c < 0 || c >= a.dim) continue;
      SetWeight(a, row, c, kind == kConstant ? first : InitialValue(words[k][0], kind, first, second));
    }
  });
}

}  // namespace tierstore::cuda
