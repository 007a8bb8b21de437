// Allocates arrays that live for many batches: large arrays get pages of their own.
//
// On malloc's heap such arrays would lie between the temporaries of every batch, and would keep the pages of
// freed temporaries from the system. Up to 16 MiB of freed pages are kept for the arrays of the next batches,
// since the system would zero new pages one by one.
#pragma once

#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace tierstore {

// Returns memory of at least `bytes`, in no defined state. Throws std::bad_alloc. Thread-safe.
void* TakePages(std::size_t bytes);
// Frees memory that TakePages returned for the same number of bytes.
void GivePages(void* at, std::size_t bytes);

// Elements that a vector gets by a size alone have no defined value, unless their type has a constructor: one
// thread would clear an array for as long as many threads take to fill the array in. A build with
// TIERSTORE_FILL_UNSET fills such elements with a pattern, so that tests find code that relies on their
// values.
template <typename T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::size_t kLeastBytes = std::size_t{64} << 10;

  PageAllocator() = default;
  template <typename U>
  explicit PageAllocator(const PageAllocator<U>&) {}

  T* allocate(std::size_t n) {
    if (n > std::numeric_limits<std::size_t>::max() / 2 / sizeof(T)) throw std::bad_alloc();
    const std::size_t bytes = n * sizeof(T);
    return static_cast<T*>(bytes < kLeastBytes ? ::operator new(bytes) : TakePages(bytes));
  }
  void deallocate(T* at, std::size_t n) {
    if (n * sizeof(T) < kLeastBytes) {
      ::operator delete(at);
    } else {
      GivePages(at, n * sizeof(T));
    }
  }
  template <typename U, typename... Values>
  void construct(U* at, Values&&... values) {
    if constexpr (sizeof...(Values) == 0) {
#ifdef TIERSTORE_FILL_UNSET
      std::memset(static_cast<void*>(at), 0xA5, sizeof(U));
#endif
      ::new (static_cast<void*>(at)) U;
    } else {
      ::new (static_cast<void*>(at)) U(std::forward<Values>(values)...);
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
