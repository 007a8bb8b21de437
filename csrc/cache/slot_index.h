// Finds the slot of a key: open addressing with linear probing over 8-byte entries (32-bit tag, 32-bit slot).
// The keys themselves stay in the tier's own array, which is consulted only when a tag matches.
#pragma once

#include <cstdint>

#include "cache/probing.h"
#include "cache/reserved_memory.h"

namespace tierstore {

class SlotIndex {
 public:
  // The key of a slot is keys[slot * stride]; the keys belong to the owner, outlive the index and do not
  // move.
  SlotIndex(const std::uint64_t* keys, std::int64_t stride, std::int64_t capacity);

  static constexpr double kBytesPerSlot = 8.0 * 4 / 3;

  // slots[i] = slot of keys[i], or -1.
  void Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const;
  // The slot must have its key already, which must be absent from the index.
  void Insert(std::int32_t slot) { Insert(&slot, 1); }
  void Insert(const std::int32_t* slots, std::int64_t n);
  // The slot must still have its key.
  void Erase(std::int32_t slot) { Erase(&slot, 1); }
  void Erase(const std::int32_t* slots, std::int64_t n);

  std::int64_t size() const { return size_; }
  std::int64_t memory_bytes() const {
    return static_cast<std::int64_t>(entries_.size() * sizeof(std::uint64_t));
  }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};

  static std::uint32_t Tag(std::uint64_t key);
  const std::uint64_t& Key(std::uint32_t slot) const { return keys_[slot * stride_]; }
  static std::uint32_t EntryTag(std::uint64_t entry) { return static_cast<std::uint32_t>(entry >> 32); }
  static std::uint32_t EntrySlot(std::uint64_t entry) { return static_cast<std::uint32_t>(entry); }
  std::uint64_t Home(std::uint32_t tag) const { return HomePlace(tag, entries_.size()); }
  std::uint64_t Next(std::uint64_t at) const { return NextPlace(at, entries_.size()); }
  void Place(std::uint64_t entry);
  void EraseAt(std::uint64_t hole);
  void Grow();

  const std::uint64_t* keys_;
  std::uint64_t stride_;
  OwnArray<std::uint64_t> entries_;
  std::int64_t size_ = 0;
};

}  // namespace tierstore
