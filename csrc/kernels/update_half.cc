#include "kernels/update_kernels.h"

namespace tierstore::update {

template struct UpdateRunner<ShortWeights<Half>>;

}  // namespace tierstore::update
