// Maps address space that huge pages fit into: most of the cost of a random access to a large array is the
// walk to a page that is not in the TLB.
#pragma once

#include <cstddef>

namespace tierstore {

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Returns private anonymous memory that begins at a huge page's boundary; give the memory back with munmap.
// `bytes` is a multiple of kHugePageBytes. PROT_NONE only reserves address space. Throws std::bad_alloc.
std::byte* MapAligned(std::size_t bytes, int protection);

}  // namespace tierstore
