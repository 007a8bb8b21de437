// Makes arrays that native code hands to Python. Large arrays lie in pages of their own
// (common/page_allocator.h): on malloc's heap, between the temporaries of the user's dense layers, they would
// keep twice their size.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/page_allocator.h"

namespace tierstore {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

// Returns an array that takes over the elements of `values`.
template <typename T, typename Allocator>
Array<T> Owned(std::vector<T, Allocator>&& values) {
  using Vector = std::vector<T, Allocator>;
  auto kept = std::make_unique<Vector>(std::move(values));
  const auto size = static_cast<pybind11::ssize_t>(kept->size());
  T* const data = kept->data();
  const pybind11::capsule owner(kept.get(), [](void* at) { delete static_cast<Vector*>(at); });
  kept.release();
  return Array<T>(size, data, owner);
}

// Returns an array of `n` elements in no defined state.
template <typename T>
Array<T> Fresh(pybind11::ssize_t n) {
  const auto bytes = static_cast<std::size_t>(n) * sizeof(T);
  if (bytes < PageAllocator<T>::kLeastBytes) return Array<T>(n);
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
  return Array<T>(n, data, owner);
}

// Returns an array over the elements of `values`, which `owner` keeps.
template <typename Vector>
auto View(const Vector& values, pybind11::handle owner) {
  return Array<typename Vector::value_type>(static_cast<pybind11::ssize_t>(values.size()), values.data(),
                                            owner);
}

// Returns the slots (int32) of keys in a Tier or HeldRows, -1 where a key is not there.
template <class Rows>
Array<std::int32_t> FindSlots(Rows& rows, const Array<std::uint64_t>& keys) {
  Array<std::int32_t> slots = Fresh<std::int32_t>(keys.size());
  std::int32_t* out = slots.mutable_data();
  pybind11::gil_scoped_release unlocked;
  rows.Find(keys.data(), keys.size(), out);
  return slots;
}

}  // namespace tierstore
