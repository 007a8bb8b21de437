// Address space for huge pages: most of the cost of a random access to a large array is the walk to a page
// that is not in the TLB.
#pragma once

#include <cstddef>

namespace tierstore {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Private anonymous memory that begins at a huge page's boundary, to be given back with munmap; PROT_NONE
// only reserves it. `bytes`: a multiple of kHugePageBytes. Throws std::bad_alloc.
std::byte* MapAligned(std::size_t bytes, int protection);

}  // namespace tierstore
