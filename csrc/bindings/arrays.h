// Arrays that native code hands to Python. Large ones lie in pages of their own (common/page_allocator.h): on
// malloc's heap, between the temporaries of the user's dense layers, they would keep twice their size.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <memory>

#include "common/page_allocator.h"

namespace tierstore {

// An array that takes what `values` has.
template <typename T>
pybind11::array_t<T, pybind11::array::c_style> Owned(PageVector<T>&& values) {
  auto kept = std::make_unique<PageVector<T>>(std::move(values));
  const auto size = static_cast<pybind11::ssize_t>(kept->size());
  T* const data = kept->data();
  const pybind11::capsule owner(kept.get(), [](void* at) { delete static_cast<PageVector<T>*>(at); });
  kept.release();
  return pybind11::array_t<T, pybind11::array::c_style>(size, data, owner);
}

// An array of `n` elements in no defined state.
template <typename T>
pybind11::array_t<T, pybind11::array::c_style> Fresh(pybind11::ssize_t n) {
  const auto bytes = static_cast<std::size_t>(n) * sizeof(T);
  if (bytes < PageAllocator<T>::kLeastBytes) return pybind11::array_t<T, pybind11::array::c_style>(n);
  struct Block {
    explicit Block(std::size_t bytes) : bytes(bytes), at(TakePages(bytes)) {}
    ~Block() { GivePages(at, bytes); }
    std::size_t bytes;
    void* at;
  };
  auto block = std::make_unique<Block>(bytes);
  T* const data = static_cast<T*>(block->at);
  const pybind11::capsule owner(block.get(), [](void* at) { delete static_cast<Block*>(at); });
  block.release();
  return pybind11::array_t<T, pybind11::array::c_style>(n, data, owner);
}

}  // namespace tierstore
