// Reserves address space once and commits memory as the memory is used. So rows stay at one address while a
// tier without a fixed budget, or a batch that overflows its tier, grows behind them. A forked child does not
// have this memory (common/fork.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace tierstore {

// The system refuses address space or memory. The message has the numbers.
class AddressSpaceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ReservedMemory {
 public:
  // Reserves `bytes` of address space without committing any. Throws AddressSpaceError.
  explicit ReservedMemory(std::size_t bytes);
  ~ReservedMemory();
  ReservedMemory(ReservedMemory&& other) noexcept { Swap(other); }
  ReservedMemory& operator=(ReservedMemory&& other) noexcept {
    Swap(other);
    return *this;
  }
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t committed() const { return committed_; }
  // Makes the first `bytes` readable and writable (zero-filled when new). Throws AddressSpaceError.
  void Commit(std::size_t bytes);
  // Gives the pages behind `bytes` back to the system; they read as zeros when used again.
  void Discard(std::size_t bytes);

 private:
  void Swap(ReservedMemory& other) noexcept;

  std::size_t reserved_ = 0;
  std::byte* data_ = nullptr;
  std::size_t committed_ = 0;
  std::size_t huge_ = 0;          // leading bytes that lie in huge pages where the system has such pages
  std::uint32_t generation_ = 0;  // ForkCount() of the process that has the memory
};

// A ReservedArray grows without moving, so another thread may use its own elements meanwhile.
template <typename T>
class ReservedArray {
 public:
  explicit ReservedArray(std::size_t limit) : memory_(limit * sizeof(T)) {}
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  T& operator[](std::size_t i) const { return data()[i]; }
  void Commit(std::size_t size) { memory_.Commit(size * sizeof(T)); }

 private:
  ReservedMemory memory_;
};

// An OwnArray has a fixed size, and lies in reserved memory.
template <typename T>
class OwnArray {
 public:
  OwnArray() : OwnArray(0, T{}) {}
  OwnArray(std::size_t size, const T& value) : array_(size), size_(size) {
    array_.Commit(size);
    Fill(value);
  }
  void Fill(const T& value) {
    for (T& element : *this) element = value;
  }
  T& operator[](std::size_t i) const { return array_[i]; }
  T* data() const { return array_.data(); }
  T* begin() const { return array_.data(); }
  T* end() const { return array_.data() + size_; }
  std::size_t size() const { return size_; }

 private:
  ReservedArray<T> array_;
  std::size_t size_;
};

}  // namespace tierstore
