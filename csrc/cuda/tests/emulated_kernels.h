// The GPU kernels that a library of tests has in the emulator, by name.
#pragma once

#include <map>
#include <tuple>

#include "cuda/batch.cuh"
#include "cuda/init.cuh"
#include "cuda/lookup.cuh"
#include "cuda/rows.cuh"
#include "cuda/sort.cuh"
#include "cuda/update.cuh"

namespace tierstore::cuda::emulator {

struct Kernel {
  void (*run)(const void* args);
  std::size_t args_bytes;
};
using Name = std::tuple<std::string, int, int, int, int>;  // kernel, dim, vec, optimizer, weights; -1: any
inline std::map<Name, Kernel> kernels;

template <typename Args, void (*kFunction)(const Args&)>
Kernel Of() {
  return {[](const void* args) { kFunction(*static_cast<const Args*>(args)); }, sizeof(Args)};
}

template <int kDim, int kVec, int kKind, int kType>
void AddUpdates() {
  using U = Update<kDim, kVec, kKind, kType>;
  kernels[{"update_cold", kDim, kVec, kKind, kType}] = Of<UpdateArgs, &U::Cold>();
  kernels[{"update_singles", kDim, kVec, kKind, kType}] = Of<UpdateArgs, &U::ColdSingles>();
  kernels[{"update_pieces", kDim, kVec, kKind, kType}] = Of<UpdateArgs, &U::Pieces>();
  kernels[{"update_hot", kDim, kVec, kKind, kType}] = Of<UpdateArgs, &U::Hot>();
}

template <int kDim, int kVec, int kType = kFloat32>
void AddLayout() {
  using L = Lookup<kDim, kVec, kType>;
  kernels[{"lookup_pooled", kDim, kVec, -1, kType}] = Of<LookupPooledArgs, &L::Pooled>();
  kernels[{"lookup_rows", kDim, kVec, -1, kType}] = Of<LookupRowsArgs, &L::Rows>();
  kernels[{"weight_grads", kDim, kVec, -1, kType}] = Of<WeightGradsArgs, &L::WeightGrads>();
  AddUpdates<kDim, kVec, kSgd, kType>();
  AddUpdates<kDim, kVec, kRowWiseAdagrad, kType>();
  AddUpdates<kDim, kVec, kAdagrad, kType>();
  AddUpdates<kDim, kVec, kAdam, kType>();
  AddUpdates<kDim, kVec, kMomentum, kType>();
  AddUpdates<kDim, kVec, kNesterov, kType>();
  AddUpdates<kDim, kVec, kLars, kType>();
  AddUpdates<kDim, kVec, kLamb, kType>();
  AddUpdates<kDim, kVec, kPartialRowWiseAdam, kType>();
  AddUpdates<kDim, kVec, kPartialRowWiseLamb, kType>();
}

// Few layouts of every type of weights, of some_layouts.cc: each takes seconds to compile.
void AddSomeLayouts();

inline void AddKernelsOfAnyLayout() {
  kernels[{"move_rows", -1, -1, -1, -1}] = Of<MoveRowsArgs, &MoveRows>();
  kernels[{"init_rows", -1, -1, -1, -1}] = Of<InitRowsArgs, &InitRows>();
  kernels[{"bag_shares", -1, -1, -1, -1}] = Of<BagSharesArgs, &BagShares>();
  kernels[{"sort_count", -1, -1, -1, -1}] = Of<SortArgs, &SortCount>();
  kernels[{"sort_place", -1, -1, -1, -1}] = Of<SortArgs, &SortPlace>();
  kernels[{"sum_rows", -1, -1, -1, -1}] = Of<SumsArgs, &SumRows>();
  kernels[{"batch_runs", -1, -1, -1, -1}] = Of<BatchArgs, &BatchRuns>();
  kernels[{"batch_lengths", -1, -1, -1, -1}] = Of<BatchArgs, &BatchLengths>();
  kernels[{"batch_sums", -1, -1, -1, -1}] = Of<BatchArgs, &BatchSums>();
  kernels[{"batch_unique", -1, -1, -1, -1}] = Of<BatchArgs, &BatchUnique>();
  kernels[{"batch_positions", -1, -1, -1, -1}] = Of<BatchArgs, &BatchPositions>();
}

}  // namespace tierstore::cuda::emulator
