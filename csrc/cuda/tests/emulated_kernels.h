// The GPU kernels that a library of tests has in the emulator, by name.
#pragma once

#include <map>
#include <tuple>

#include "cuda/init.cuh"
#include "cuda/lookup.cuh"
#include "cuda/rows.cuh"
#include "cuda/update.cuh"

namespace tierstore::cuda::emulator {

struct Kernel {
  void (*run)(const void* args);
  std::size_t args_bytes;
};
using Name = std::tuple<std::string, int, int, int>;  // kernel, dim, vec, optimizer; -1: any
inline std::map<Name, Kernel> kernels;

template <typename Args, void (*kFunction)(const Args&)>
Kernel Of() {
  return {[](const void* args) { kFunction(*static_cast<const Args*>(args)); }, sizeof(Args)};
}

template <int kDim, int kVec, int kKind>
void AddUpdates() {
  using U = Update<kDim, kVec, kKind>;
  kernels[{"update_cold", kDim, kVec, kKind}] = Of<UpdateArgs, &U::Cold>();
  kernels[{"update_pieces", kDim, kVec, kKind}] = Of<UpdateArgs, &U::Pieces>();
  kernels[{"update_hot", kDim, kVec, kKind}] = Of<UpdateArgs, &U::Hot>();
}

template <int kDim, int kVec>
void AddLayout() {
  using L = Lookup<kDim, kVec>;
  kernels[{"lookup_pooled", kDim, kVec, -1}] = Of<LookupPooledArgs, &L::Pooled>();
  kernels[{"lookup_rows", kDim, kVec, -1}] = Of<LookupRowsArgs, &L::Rows>();
  kernels[{"weight_grads", kDim, kVec, -1}] = Of<WeightGradsArgs, &L::WeightGrads>();
  AddUpdates<kDim, kVec, kSgd>();
  AddUpdates<kDim, kVec, kRowWiseAdagrad>();
  AddUpdates<kDim, kVec, kAdagrad>();
  AddUpdates<kDim, kVec, kAdam>();
  AddUpdates<kDim, kVec, kMomentum>();
  AddUpdates<kDim, kVec, kNesterov>();
  AddUpdates<kDim, kVec, kLars>();
  AddUpdates<kDim, kVec, kLamb>();
  AddUpdates<kDim, kVec, kPartialRowWiseAdam>();
  AddUpdates<kDim, kVec, kPartialRowWiseLamb>();
}

inline void AddKernelsOfAnyLayout() {
  kernels[{"move_rows", -1, -1, -1}] = Of<MoveRowsArgs, &MoveRows>();
  kernels[{"init_rows", -1, -1, -1}] = Of<InitRowsArgs, &InitRows>();
  kernels[{"bag_shares", -1, -1, -1}] = Of<BagSharesArgs, &BagShares>();
}

}  // namespace tierstore::cuda::emulator
