// Moves of whole rows between slots, arenas and staging memory.
#pragma once

#include "cuda/device.cuh"

namespace tierstore::cuda {

TIERSTORE_DEVICE void MoveRows(const MoveRowsArgs& a) {
  using W = Word<4>;
  const int64_t total = a.n * a.words, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    const int64_t item = i / a.words, word = i - item * a.words;
    const int64_t from = a.from_rows != nullptr ? Load(a.from_rows + item) : item;
    const int64_t to = a.to_rows != nullptr ? Load(a.to_rows + item) : item;
    const W value = Load(reinterpret_cast<const W*>(a.from + from * a.from_floats) + word);
    Store(reinterpret_cast<W*>(a.to + to * a.to_floats) + word, value);
  }
}

}  // namespace tierstore::cuda
