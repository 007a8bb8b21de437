#include "kernels/update_kernels.h"

namespace tierstore::update {

template struct UpdateRunner<ShortWeights<Bfloat16>>;

}  // namespace tierstore::update
