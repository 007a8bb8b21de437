// The kernels by name, in three parts that are compiled apart: those of any row layout; lookups, if
// TIERSTORE_DIM and TIERSTORE_VEC are defined (4 where dim is a multiple of 4, and all outputs and gradients
// begin at 16 bytes; else 1); updates, if TIERSTORE_OPTIMIZER (kernels/optimizer.h, OptimizerKind) is, too.
// With TIERSTORE_DIM comes TIERSTORE_WEIGHTS, the type of the weights (kernels/rows.h, WeightType).
#include "cuda/batch.cuh"
#include "cuda/init.cuh"
#include "cuda/lookup.cuh"
#include "cuda/rows.cuh"
#include "cuda/sort.cuh"
#include "cuda/update.cuh"

// The C names are how the driver finds the kernels. The registers of so many `blocks` of 256 threads must fit
// a multiprocessor.
#define TIERSTORE_KERNEL(name, Args, function, blocks)                                               \
  extern "C" __global__ void __launch_bounds__(256, blocks) name(const tierstore::cuda::Args args) { \
    tierstore::cuda::function(args);                                                                 \
  }
#if !defined(TIERSTORE_DIM)
TIERSTORE_KERNEL(move_rows, MoveRowsArgs, MoveRows, 2)
TIERSTORE_KERNEL(init_rows, InitRowsArgs, InitRows, 2)
TIERSTORE_KERNEL(bag_shares, BagSharesArgs, BagShares, 2)
TIERSTORE_KERNEL(sort_count, SortArgs, SortCount, 2)
TIERSTORE_KERNEL(sort_place, SortArgs, SortPlace, 2)
TIERSTORE_KERNEL(sum_rows, SumsArgs, SumRows, 2)
TIERSTORE_KERNEL(batch_runs, BatchArgs, BatchRuns, 2)
TIERSTORE_KERNEL(batch_lengths, BatchArgs, BatchLengths, 2)
TIERSTORE_KERNEL(batch_sums, BatchArgs, BatchSums, 2)
TIERSTORE_KERNEL(batch_unique, BatchArgs, BatchUnique, 2)
TIERSTORE_KERNEL(batch_positions, BatchArgs, BatchPositions, 2)
#elif !defined(TIERSTORE_OPTIMIZER)
namespace tierstore::cuda {
using LookupOfLayout = Lookup<TIERSTORE_DIM, TIERSTORE_VEC, TIERSTORE_WEIGHTS>;
}
TIERSTORE_KERNEL(lookup_pooled, LookupPooledArgs, LookupOfLayout::Pooled,
                 tierstore::cuda::LookupOfLayout::kBlocks)
TIERSTORE_KERNEL(lookup_rows, LookupRowsArgs, LookupOfLayout::Rows, 2)
TIERSTORE_KERNEL(weight_grads, WeightGradsArgs, LookupOfLayout::WeightGrads, 2)
#else
namespace tierstore::cuda {
using UpdateOfLayout = Update<TIERSTORE_DIM, TIERSTORE_VEC, TIERSTORE_OPTIMIZER, TIERSTORE_WEIGHTS>;
}
TIERSTORE_KERNEL(update_singles, UpdateArgs, UpdateOfLayout::ColdSingles, 2)
TIERSTORE_KERNEL(update_cold, UpdateArgs, UpdateOfLayout::Cold,
                 tierstore::cuda::UpdateOfLayout::kBlocksOfCold)
TIERSTORE_KERNEL(update_pieces, UpdateArgs, UpdateOfLayout::Pieces, tierstore::cuda::UpdateOfLayout::kBlocks)
TIERSTORE_KERNEL(update_hot, UpdateArgs, UpdateOfLayout::Hot, 2)
#endif
