// Memory for arrays that live for many batches: large ones get pages of their own.
//
// On malloc's heap they would lie between the temporaries of every batch, and hold the pages of those too
// once these are freed.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <limits>
#include <new>
#include <vector>

namespace tierstore {

template <typename T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::size_t kLeastBytes = std::size_t{64} << 10;

  PageAllocator() = default;
  template <typename U>
  explicit PageAllocator(const PageAllocator<U>&) {}

  T* allocate(std::size_t n) {
    if (n > std::numeric_limits<std::size_t>::max() / sizeof(T)) throw std::bad_alloc();
    if (n * sizeof(T) < kLeastBytes) return static_cast<T*>(::operator new(n * sizeof(T)));
    void* at = mmap(nullptr, n * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(at);
  }
  void deallocate(T* at, std::size_t n) {
    if (n * sizeof(T) < kLeastBytes) {
      ::operator delete(at);
    } else {
      munmap(at, n * sizeof(T));
    }
  }
  template <typename U>
  bool operator==(const PageAllocator<U>&) const {
    return true;
  }
};

template <typename T>
using PageVector = std::vector<T, PageAllocator<T>>;

}  // namespace tierstore
