// Moves of whole rows between slots, arenas and staging memory.
#pragma once

#include "cuda/device.cuh"

namespace tierstore::cuda {

// Where word i of a move comes from, and where it goes.
struct MovedWord {
  const Word<4>* from;
  Word<4>* to;
};

TIERSTORE_DEVICE MovedWord WordOfMove(const MoveRowsArgs& a, int64_t i) {
  const int64_t item = i / a.words, word = i - item * a.words;
  const int64_t from = a.from_rows != nullptr ? Load(a.from_rows + item) : item;
  const int64_t to = a.to_rows != nullptr ? Load(a.to_rows + item) : item;
  return {reinterpret_cast<const Word<4>*>(a.from + from * a.from_floats) + word,
          reinterpret_cast<Word<4>*>(a.to + to * a.to_floats) + word};
}

// The link to the host takes a microsecond for a word, and few blocks move rows. So each thread reads several
// words before it writes one: the compiler would not, since it cannot know that rows do not overlap.
TIERSTORE_DEVICE void MoveRows(const MoveRowsArgs& a) {
  constexpr int kAhead = 4;
  const int64_t total = a.n * a.words, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (kAhead - 1) * step < total; i += kAhead * step) {
    MovedWord moved[kAhead];
    Word<4> values[kAhead];
    TIERSTORE_UNROLL
    for (int k = 0; k < kAhead; ++k) moved[k] = WordOfMove(a, i + k * step);
    TIERSTORE_UNROLL
    for (int k = 0; k < kAhead; ++k) values[k] = Load(moved[k].from);
    TIERSTORE_UNROLL
    for (int k = 0; k < kAhead; ++k) Store(moved[k].to, values[k]);
  }
  for (; i < total; i += step) {
    const MovedWord moved = WordOfMove(a, i);
    Store(moved.to, Load(moved.from));
  }
}

}  // namespace tierstore::cuda
