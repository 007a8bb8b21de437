// Holds the array of an index. The array is zeros at first, grows at its right end, and lies in huge pages
// once it is large. A forked child does not get the array.
#pragma once

#include <cstddef>
#include <utility>

#include "common/fork.h"

namespace tierstore {

class IndexMemory {
 public:
  IndexMemory() = default;
  IndexMemory(IndexMemory&& other) noexcept { *this = std::move(other); }
  IndexMemory& operator=(IndexMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(reserved_bytes_, other.reserved_bytes_);
    std::swap(fork_count_, other.fork_count_);
    return *this;
  }
  ~IndexMemory();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // Grows to at least `bytes` and keeps the contents, perhaps at another address. Throws std::bad_alloc, with
  // nothing changed.
  void Extend(std::size_t bytes);
  // Makes a part zero. Its whole pages go back to the system until they are used.
  void Clear(std::size_t offset, std::size_t bytes);

 private:
  void Reserve(std::size_t bytes);

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0, reserved_bytes_ = 0;  // bytes in use, and of address space
  unsigned fork_count_ = ForkCount();
};

}  // namespace tierstore
