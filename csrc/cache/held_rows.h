// Rows outside of any tier, found by key: rows that are read ahead of a plan, or kept for one.
//
// Not thread-safe. The caller copies rows to and from rows(); slots are handed out in order from 0 until one
// is given back, so that rows added to an empty object lie side by side.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/reserved_memory.h"
#include "cache/slot_index.h"

namespace tierstore {

class HeldRows {
 public:
  // What a row costs beside its bytes: key, free list, index entry.
  static constexpr double kBytesPerRow = 8 + 4 + SlotIndex::kBytesPerSlot;

  // Throws std::invalid_argument for a capacity or row size below 1.
  HeldRows(std::int64_t capacity, std::int64_t row_bytes);

  // slots[i] = slot of keys[i], or -1.
  void Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const {
    index_.Find(keys, n, slots);
  }
  // Slots for keys without repeats, none of which is here; there must be room (std::length_error).
  void Add(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots);
  // Forgets the rows at `slots`.
  void Remove(const std::int32_t* slots, std::int64_t n);
  // Forgets the rows of `keys` that are here.
  void Discard(const std::uint64_t* keys, std::int64_t n);

  std::int64_t size() const { return index_.size(); }
  std::int64_t capacity() const { return capacity_; }
  std::int64_t row_bytes() const { return row_bytes_; }
  std::byte* rows() const { return arena_.data(); }

 private:
  std::int64_t capacity_;
  std::int64_t row_bytes_;
  ReservedMemory arena_;  // its pages cost nothing before they are written
  ReservedArray<std::uint64_t> keys_;
  SlotIndex index_;
  std::vector<std::int32_t> free_;  // slots given back; used before fresh ones
  std::int64_t fresh_ = 0;          // slots from here on were never used
};

}  // namespace tierstore
