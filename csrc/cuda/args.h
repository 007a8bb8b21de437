// Arguments of the GPU kernels: one struct each, read by the host, nvcc, NVRTC and the emulator. Addresses
// are of the device. The CPU kernels of the same names say what a kernel computes (csrc/kernels).
#pragma once

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

namespace tierstore::cuda {

constexpr int kWarp = 32;

// Rows by slot: the weights of slot s, of the type that a kernel is compiled for, are weight_floats * s
// floats behind `weights`, its optimizer's state is state_floats * s floats behind `state`. Both distances
// are multiples of 4. Where weights and state share a row, they are equal.
struct RowsArgs {
  float* weights;
  int64_t weight_floats;
  float* state;
  int64_t state_floats;
};

// Rows that are moved, by slot: the first words of each, which are `floats` apart, and its other words. Those
// of an arena that keeps a row together begin where its first words end.
template <typename Float>
struct MovedRows {
  Float* head;
  int64_t head_floats;
  Float* tail;
  int64_t tail_floats;
  const int32_t* slots;  // of each moved row; none: i
};

// to.slots[i] = from.slots[i] for i < n, in words of 16 bytes, of which the first head_words are in the
// heads.
struct MoveRowsArgs {
  MovedRows<const float> from;
  MovedRows<float> to;
  int64_t n;
  int64_t words;
  int64_t head_words;
};

// kernels/lookup.h, Gather.
struct GatherArgs {
  RowsArgs rows;
  const int32_t* slots;
  const int32_t* inverse;
};

// kernels/bags.h, Bags.
struct BagsArgs {
  const int64_t* offsets;
  int64_t num_bags;
  const int64_t* bag_start;
  int64_t num_features;
  const int64_t* out_offset;
  const int64_t* out_stride;
  const uint8_t* poolings;
};

struct LookupPooledArgs {
  GatherArgs gather;
  BagsArgs bags;
  const float* weights;
  float* out;
  int32_t* argmax;
  int32_t are_short;  // most bags have a position at most
  int32_t unused;
};

struct LookupRowsArgs {
  GatherArgs gather;
  int64_t n;
  float* out;
  int64_t out_stride;
};

struct WeightGradsArgs {
  GatherArgs gather;
  BagsArgs bags;
  const float* grad;
  float* out;
};

// What a bag gives to the gradients of its positions. Kernel bag_shares fills them.
struct BagShare {
  int64_t grad;    // of the bag, in floats from the gradient's address
  int64_t argmax;  // in integers from the argmax's address; -1: not a max
  float scale;
  int32_t unused;
};

struct BagSharesArgs {
  BagsArgs bags;
  int64_t dim;
  const int32_t* inverse;  // positions that it skips do not count in a mean
  BagShare* shares;        // of each bag
  int32_t* bag_of;         // of each position
};

// Gradients of positions: those of their bags if `shares` is set, else grad[p * stride ...].
struct GradsArgs {
  const float* grad;
  int64_t stride;
  const BagShare* shares;
  const int32_t* bag_of;
  const float* weights;
  const int32_t* argmax;
};

// kernels/optimizer.h, OptimizerStep, whose kind is the kernel's.
struct StepArgs {
  float lr, eps, l2, keep, decay, beta1, beta2, rest1, rest2, adam_lr, adam_inv_sqrt_v;
  float clip_value, clip_norm;
  int32_t decays_all;
  int64_t number;
  double keep_missed;
};

// kernels/update.h, UpdateRounding.
struct RoundingArgs {
  const uint64_t* keys;
  const uint64_t* seeds;
  const int64_t* columns;
};

// kernels/update.h. A row with more than kReducePositions positions is hot: kernel update_pieces adds each of
// its pieces, update_hot the pieces. The others are updated by
// update_cold, or by update_singles where most rows have one position.
struct UpdateArgs {
  RowsArgs rows;
  const int32_t* slots;
  int64_t num_slots;
  const int32_t* csr_start;
  const int32_t* csr_positions;
  GradsArgs grads;
  StepArgs step;
  RoundingArgs rounding;
  int32_t check_finite;
  int32_t num_long;
  uint8_t* rejected;  // of each unique row: 1 if its gradient is not finite
  float* squares;     // kernels/update.h, RowSquares
  const float* means;
  const int32_t* hot;        // unique rows, and num_slots; behind that the num_long rows of update_cold
  const int32_t* hot_piece;  // of each hot row its first piece, and the number of pieces
  int64_t num_hot;
  float* partials;  // sums of the pieces
};

// kernels/init.h, InitRows.
struct InitRowsArgs {
  RowsArgs rows;
  const int32_t* slots;
  const uint64_t* keys;
  int64_t n;
  int64_t dim;
  int64_t state_floats;
  int64_t behind;  // floats of a row from its state on
  float state_value;
  int32_t weights;  // kernels/rows.h, WeightType
  const uint8_t* kinds;
  const float* first;
  const float* second;
  const uint64_t* seeds;
  const int64_t* columns;
};

// A pass of a stable sort of n keys, with their positions, by `bits` bits from `shift` on.
struct SortArgs {
  const uint32_t* keys;
  const int32_t* positions;  // none: i
  uint32_t* sorted_keys;
  int32_t* sorted_positions;
  int32_t* counts;  // a row of `stride` for each value of the bits: keys with it in each tile, or before it
  int64_t stride;
  const int32_t* totals;  // of each row
  int64_t n;
  int32_t shift;
  int32_t bits;
};

// num_rows rows of `columns` numbers, `stride` apart, a multiple of 4, that become the sums of the numbers
// before each; `totals` gets the sum of each row.
struct SumsArgs {
  int32_t* rows;
  int64_t num_rows;
  int64_t columns;
  int64_t stride;
  int32_t* totals;
};

// cache/batch.h, Batch, and cache/csr.h of n positions, whose keys are sorted. The key of a position is its
// id behind the `base` of its table; positions with the key `skipped`, which is the largest, use no row.
struct BatchArgs {
  const uint32_t* keys;
  const uint32_t* sorted_keys;
  const int32_t* sorted_positions;
  int64_t n;
  uint32_t skipped;
  int32_t num_tables;
  const uint32_t* bases;   // ascending
  const uint32_t* tables;  // the number of each table
  int32_t* first_runs;     // where in a tile of sorted keys the first run of equal keys begins; n: nowhere
  int32_t* last_runs;      // where the last one does; -1: nowhere
  int32_t* firsts;         // of each position: the length of the run that it is the first position of, then
                           // which unique key that is; 0: it is not the first one
  int32_t* sums;           // of the tiles of positions: a row of runs, a row of lengths
  int64_t stride;
  const int32_t* totals;  // the number of unique keys, and of positions that use a row
  uint64_t* unique;
  int32_t* inverse;
  int32_t* csr_start;
  int32_t* csr_positions;
};

}  // namespace tierstore::cuda
