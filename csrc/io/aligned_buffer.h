// Holds memory for direct IO, which is block-aligned, zero, resident only where it was touched, and movable.
// Buffers of whole huge pages use huge pages where the system has them: the kernel then pins few pages for
// each transfer, which is worth a quarter of the speed of large writes. A forked child does not get the
// buffers, since a page that a transfer writes to must not become a copy.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

#include "common/fork.h"
#include "common/huge_pages.h"
#include "io/env.h"

namespace tierstore {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t size) : size_((size + kBlockBytes - 1) / kBlockBytes * kBlockBytes) {
    if (size_ > 0 && size_ % kHugePageBytes == 0) {
      data_ = MapAligned(size_, PROT_READ | PROT_WRITE);
      madvise(data_, size_, MADV_HUGEPAGE);
    } else {
      void* address = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (address == MAP_FAILED) throw std::bad_alloc();
      data_ = static_cast<std::byte*>(address);
    }
    KeepFromChildren(data_, size_);
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : size_(std::exchange(other.size_, 0)),
        data_(std::exchange(other.data_, nullptr)),
        fork_count_(other.fork_count_) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(size_, other.size_);
    std::swap(data_, other.data_);
    std::swap(fork_count_, other.fork_count_);
    return *this;
  }
  ~AlignedBuffer() {
    if (data_ != nullptr && fork_count_ == ForkCount()) munmap(data_, size_);
  }

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_ = 0;
  std::byte* data_ = nullptr;
  unsigned fork_count_ = ForkCount();
};

}  // namespace tierstore
