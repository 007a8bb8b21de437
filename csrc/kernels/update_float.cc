#include "kernels/update_kernels.h"

namespace tierstore::update {

template struct UpdateRunner<FloatWeights>;

}  // namespace tierstore::update
