// The kernels of one row layout, by name. The compiler's command line says which: TIERSTORE_DIM,
// TIERSTORE_VEC (4 where dim is a multiple of 4, and all outputs and gradients begin at 16 bytes; else 1) and
// TIERSTORE_OPTIMIZER (kernels/optimizer.h, OptimizerKind).
#include "cuda/init.cuh"
#include "cuda/lookup.cuh"
#include "cuda/rows.cuh"
#include "cuda/update.cuh"

namespace tierstore::cuda {
using LookupOfLayout = Lookup<TIERSTORE_DIM, TIERSTORE_VEC>;
using UpdateOfLayout = Update<TIERSTORE_DIM, TIERSTORE_VEC, TIERSTORE_OPTIMIZER>;
}  // namespace tierstore::cuda

// The C names are how the driver finds the kernels. Two blocks of 256 threads must fit a multiprocessor:
// without that bound nvcc 13 spills registers of lookup_pooled for sm_100.
#define TIERSTORE_KERNEL(name, Args, function)                                                  \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const tierstore::cuda::Args args) { \
    tierstore::cuda::function(args);                                                            \
  }
TIERSTORE_KERNEL(move_rows, MoveRowsArgs, MoveRows)
TIERSTORE_KERNEL(init_rows, InitRowsArgs, InitRows)
TIERSTORE_KERNEL(lookup_pooled, LookupPooledArgs, LookupOfLayout::Pooled)
TIERSTORE_KERNEL(lookup_rows, LookupRowsArgs, LookupOfLayout::Rows)
TIERSTORE_KERNEL(weight_grads, WeightGradsArgs, LookupOfLayout::WeightGrads)
TIERSTORE_KERNEL(bag_shares, BagSharesArgs, BagShares)
TIERSTORE_KERNEL(update_cold, UpdateArgs, UpdateOfLayout::Cold)
TIERSTORE_KERNEL(update_pieces, UpdateArgs, UpdateOfLayout::Pieces)
TIERSTORE_KERNEL(update_hot, UpdateArgs, UpdateOfLayout::Hot)
