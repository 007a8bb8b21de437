#include "common/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace tierstore {

std::byte* MapAligned(std::size_t bytes, int protection) {
  // Address space that is only reserved must not count towards the system's overcommit limit.
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (protection == PROT_NONE ? MAP_NORESERVE : 0);
  void* address = mmap(nullptr, bytes + kHugePageBytes, protection, flags, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(address);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(begin) % kHugePageBytes;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + bytes, kHugePageBytes - before);
  return begin + before;
}

}  // namespace tierstore
