// Moves of whole rows between slots, arenas and staging memory.
#pragma once

#include "cuda/device.cuh"

namespace tierstore::cuda {

// Where word i of a move comes from, and where it goes.
struct MovedWord {
  const Word<4>* from;
  Word<4>* to;
};

TIERSTORE_DEVICE const Word<4>* WordAt(const float* row) { return reinterpret_cast<const Word<4>*>(row); }
TIERSTORE_DEVICE Word<4>* WordAt(float* row) { return reinterpret_cast<Word<4>*>(row); }

template <typename Float>
TIERSTORE_DEVICE auto PlaceOf(const MovedRows<Float>& rows, int64_t item, int64_t word, int64_t head_words) {
  const int64_t slot = rows.slots != nullptr ? Load(rows.slots + item) : item;
  return word < head_words ? WordAt(rows.head + slot * rows.head_floats) + word
                           : WordAt(rows.tail + slot * rows.tail_floats) + (word - head_words);
}

TIERSTORE_DEVICE MovedWord WordOfMove(const MoveRowsArgs& a, int64_t i) {
  const int64_t item = i / a.words, word = i - item * a.words;
  return {PlaceOf(a.from, item, word, a.head_words), PlaceOf(a.to, item, word, a.head_words)};
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
