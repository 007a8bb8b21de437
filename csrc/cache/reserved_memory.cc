#include "cache/reserved_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace tierstore {
namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t RoundUp(std::size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }
}  // namespace

ReservedMemory::ReservedMemory(std::size_t bytes) : reserved_(RoundUp(std::max<std::size_t>(bytes, 1))) {
  // PROT_NONE memory is not charged to any overcommit limit.
  void* address = mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(address);
}

ReservedMemory::~ReservedMemory() { munmap(data_, reserved_); }

void ReservedMemory::Commit(std::size_t bytes) {
  bytes = std::min(RoundUp(bytes), reserved_);
  if (bytes <= committed_) return;
  if (mprotect(data_ + committed_, bytes - committed_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  committed_ = bytes;
}

void ReservedMemory::Discard(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  const std::size_t begin = (bytes + kPage - 1) / kPage * kPage;
  if (begin < committed_) madvise(data_ + begin, committed_ - begin, MADV_DONTNEED);
}

}  // namespace tierstore
