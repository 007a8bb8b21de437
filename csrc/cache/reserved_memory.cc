#include "cache/reserved_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>

#include "common/fork.h"
#include "common/huge_pages.h"

namespace tierstore {
namespace {
// Smaller arrays gain little from huge pages, and there are many of them.
constexpr std::size_t kHugeFrom = std::size_t{4} << 20;
// From here on the last page is a huge page, too, though it is used in part: what it takes beyond what was
// asked for is a small share. A page that fills up in small pieces would else stay in small pages forever.
constexpr std::size_t kWholeFrom = std::size_t{8} << 20;
constexpr std::size_t RoundDown(std::size_t bytes) { return bytes / kHugePageBytes * kHugePageBytes; }
constexpr std::size_t RoundUp(std::size_t bytes) { return RoundDown(bytes + kHugePageBytes - 1); }

[[noreturn]] void Refused(const char* what, std::size_t bytes) {
  const int code = errno;
  throw AddressSpaceError("the system refuses " + std::to_string(bytes) + " bytes of " + what + ": " +
                          std::strerror(code));
}
}  // namespace

ReservedMemory::ReservedMemory(std::size_t bytes)
    : reserved_(RoundUp(std::max<std::size_t>(bytes, 1))), generation_(ForkCount()) {
  try {
    data_ = MapAligned(reserved_, PROT_NONE);
  } catch (const std::bad_alloc&) {
    Refused("address space", reserved_);
  }
  madvise(data_, reserved_, MADV_DONTFORK);
}

ReservedMemory::~ReservedMemory() {
  // In a child something else may be at this address by now.
  if (data_ != nullptr && generation_ == ForkCount()) munmap(data_, reserved_);
}

void ReservedMemory::Swap(ReservedMemory& other) noexcept {
  std::swap(reserved_, other.reserved_);
  std::swap(data_, other.data_);
  std::swap(committed_, other.committed_);
  std::swap(huge_, other.huge_);
  std::swap(generation_, other.generation_);
}

void ReservedMemory::Commit(std::size_t bytes) {
  const std::size_t accessible = std::min(RoundUp(bytes), reserved_);
  if (accessible > committed_) {
    if (mprotect(data_ + committed_, accessible - committed_, PROT_READ | PROT_WRITE) != 0)
      Refused("memory", accessible);
    committed_ = accessible;
  }
  // The last page of less memory is no huge page: it would take more memory than was asked for.
  const std::size_t huge = std::min(bytes < kWholeFrom ? RoundDown(bytes) : RoundUp(bytes), reserved_);
  if (huge <= huge_ || huge < kHugeFrom) return;
  madvise(data_ + huge_, huge - huge_, MADV_HUGEPAGE);
  huge_ = huge;
}

void ReservedMemory::Discard(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  const std::size_t begin = (bytes + kPage - 1) / kPage * kPage;
  if (begin < committed_) madvise(data_ + begin, committed_ - begin, MADV_DONTNEED);
}

}  // namespace tierstore
