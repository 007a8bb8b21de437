// Holds rows outside of any tier, found by key: rows that are read ahead of a plan, or kept for a plan.
//
// Not thread-safe, but the memory of slots that Begin has handed out is the caller's alone until Finish. The
// caller copies rows to and from rows().
#pragma once

#include <cstdint>
#include <vector>

#include "cache/reserved_memory.h"
#include "cache/slot_index.h"

namespace tierstore {

class HeldRows {
 public:
  // The bytes that a row costs beside its own: key, state, free list, index entry.
  static constexpr double kBytesPerRow = 8 + 1 + 4 + SlotIndex::kBytesPerSlot;

  // Throws std::invalid_argument for a capacity or row size below 1.
  HeldRows(std::int64_t capacity, std::int64_t row_bytes);

  // Sets slots[i] to the slot of the row of keys[i], or to -1.
  void Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots);
  // Gives slots for rows that the caller copies in at once. The keys have no repeats; there must be room
  // (std::length_error). Rows of these keys that are here, or on their way, are forgotten.
  void Add(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots);
  // Gives slots for rows that are to be read: the rows of keys that are neither here nor on their way. Moves
  // these keys to the front of `keys` and returns how many there are. There must be room for all of `keys`
  // (std::length_error).
  std::int64_t Begin(std::uint64_t* keys, std::int64_t n, std::int32_t* slots);
  // Ends a read that Begin has begun: rows that were not found, or that were forgotten meanwhile, give their
  // slots back.
  void Finish(const std::int32_t* slots, const bool* found, std::int64_t n);
  // Forgets the rows of `keys` that are here or on their way.
  void Discard(const std::uint64_t* keys, std::int64_t n);
  // Does what Find and then Discard do, but the rows that are here keep their slots until Release, or until
  // the next Take.
  void Take(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots);
  void Release();

  // Returns the number of rows here and on their way, and of those that Take has taken.
  std::int64_t size() const { return capacity_ - room(); }
  // Returns how many rows can be added.
  std::int64_t room() const { return capacity_ - fresh_ + static_cast<std::int64_t>(free_.size()); }
  std::int64_t capacity() const { return capacity_; }
  std::int64_t row_bytes() const { return row_bytes_; }
  std::byte* rows() const { return arena_.data(); }

 private:
  enum class State : std::uint8_t { kFree, kHere, kOnItsWay, kForgotten };

  std::int32_t TakeSlot();
  void GiveBack(std::int32_t slot);
  void Forget(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots);
  State& StateOf(std::int32_t slot) const { return states_[static_cast<std::size_t>(slot)]; }

  std::int64_t capacity_;
  std::int64_t row_bytes_;
  ReservedMemory arena_;  // its pages cost nothing before they are written
  ReservedArray<std::uint64_t> keys_;
  ReservedArray<State> states_;
  SlotIndex index_;                  // rows here and on their way
  std::vector<std::int32_t> free_;   // slots given back; used before fresh ones
  std::int64_t fresh_ = 0;           // slots from here on were never used
  std::vector<std::int32_t> taken_;  // since the last Release
};

}  // namespace tierstore
