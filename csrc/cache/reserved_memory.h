// Address space reserved once and committed as it is used, so that a tier's rows stay at one address while a
// tier without a fixed budget, or a batch that overflows its tier, grows behind them.
#pragma once

#include <cstddef>

namespace tierstore {

class ReservedMemory {
 public:
  // Reserves `bytes` of address space without committing any. Throws std::bad_alloc.
  explicit ReservedMemory(std::size_t bytes);
  ~ReservedMemory();
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t committed() const { return committed_; }
  // Makes the first `bytes` readable and writable (zero-filled when new). Throws std::bad_alloc.
  void Commit(std::size_t bytes);
  // Gives the pages behind `bytes` back to the system; they read as zeros when used again.
  void Discard(std::size_t bytes);

 private:
  std::size_t reserved_;
  std::byte* data_;
  std::size_t committed_ = 0;
  std::size_t huge_ = 0;  // of it from the beginning, in huge pages where the system has them
};

// An array in reserved memory: it grows without moving, so another thread may use elements that it owns
// meanwhile.
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

}  // namespace tierstore
