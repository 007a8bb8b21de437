#include "store/index_memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "common/fork.h"
#include "common/huge_pages.h"

namespace tierstore {
namespace {

constexpr std::size_t kPage = 4096;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack

constexpr std::size_t RoundUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

IndexMemory::~IndexMemory() {
  if (data_ != nullptr && fork_count_ == ForkCount()) munmap(data_, reserved_bytes_);
}

// A large index gets aligned address space to grow into, so that the index keeps its huge pages when it grows
// or moves: most of the cost of a lookup is the walk to a page that is not in the TLB.
void IndexMemory::Extend(std::size_t bytes) {
  bytes = RoundUp(bytes, kPage);
  if (bytes <= bytes_) return;
  if (bytes < kHugePageBytes) {
    void* address = data_ == nullptr
                        ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                        : mremap(data_, bytes_, bytes, MREMAP_MAYMOVE);
    if (address == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(address);
    KeepFromChildren(data_, bytes);
    reserved_bytes_ = bytes_ = bytes;
    return;
  }
  if (bytes > reserved_bytes_) Reserve(RoundUp(4 * bytes, kHugePageBytes));
  if (mprotect(data_ + bytes_, bytes - bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  madvise(data_, bytes, MADV_HUGEPAGE);
  // The huge page where the array ended so far has small pages. Where the system cannot join them (before
  // Linux 6.1), they stay.
  const std::size_t end = bytes_ / kHugePageBytes * kHugePageBytes;
  if (end < bytes_ && end + kHugePageBytes <= bytes) madvise(data_ + end, kHugePageBytes, kCollapse);
  bytes_ = bytes;
}

void IndexMemory::Clear(std::size_t offset, std::size_t bytes) {
  const std::size_t end = offset + bytes, first = RoundUp(offset, kPage), last = end / kPage * kPage;
  if (first >= last || madvise(data_ + first, last - first, MADV_DONTNEED) != 0) {
    std::memset(data_ + offset, 0, bytes);
    return;
  }
  std::memset(data_ + offset, 0, first - offset);
  std::memset(data_ + last, 0, end - last);
}

void IndexMemory::Reserve(std::size_t bytes) {
  std::byte* const to = MapAligned(bytes, PROT_NONE);
  KeepFromChildren(to, bytes);
  if (data_ != nullptr && bytes_ < kHugePageBytes) {
    // Small pages that are moved stay small, so the bytes are copied.
    if (mprotect(to, kHugePageBytes, PROT_READ | PROT_WRITE) != 0) {
      munmap(to, bytes);
      throw std::bad_alloc();
    }
    madvise(to, kHugePageBytes, MADV_HUGEPAGE);
    std::memcpy(to, data_, bytes_);
    munmap(data_, reserved_bytes_);
  } else if (data_ != nullptr) {
    if (mremap(data_, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) {
      munmap(to, bytes);
      throw std::bad_alloc();
    }
    if (reserved_bytes_ > bytes_) munmap(data_ + bytes_, reserved_bytes_ - bytes_);
  }
  data_ = to;
  reserved_bytes_ = bytes;
}

}  // namespace tierstore
