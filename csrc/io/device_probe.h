// Measures a device without a store, for comparison with the store's reads.
#pragma once

#include <cstdint>
#include <string>

#include "io/env.h"

namespace tierstore {

// Returns how many random reads of `block_bytes` the device completes per second. The reads are at aligned
// places of a file, past the page cache, `queue_depth` in flight, for at least `seconds`. `block_bytes` is a
// multiple of kBlockBytes and at most kMaxReadBytes. Throws IoError, also when the file is smaller than a
// block.
double ProbeReads(Env& env, const std::string& path, std::uint32_t block_bytes, unsigned queue_depth,
                  double seconds);

}  // namespace tierstore
