// Finds the slot of a key, by open addressing with linear probing over 8-byte entries (32-bit tag, 32-bit
// slot). The keys themselves stay in the tier's own array, which is read only when a tag matches.
//
// A table whose rows never leave may be kept directly instead: the table gets an array of slots by id, as
// soon as so many of its ids are here that the array is no larger than their entries. A lookup then reads 4
// bytes at one place instead of 24 bytes of entries and keys at two places. In a lane that has some of the
// ids only, the array is by the lane's number of an id (cache/lane_ids.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache/lane_ids.h"
#include "cache/probing.h"
#include "cache/reserved_memory.h"
#include "common/key.h"
#include "common/page_allocator.h"

namespace tierstore {

// A SlotArray has slots by the number of an id, -1 at first. Large arrays lie in reserved memory, for its
// huge pages.
class SlotArray {
 public:
  SlotArray() = default;
  explicit SlotArray(std::size_t size) : size_(size) {
    if (size * sizeof(std::int32_t) < kReservedFrom)
      small_.assign(size, -1);
    else
      large_.emplace(size, -1);
    data_ = large_ ? large_->data() : small_.data();
  }
  std::int32_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kReservedFrom = std::size_t{4} << 20;  // bytes

  PageVector<std::int32_t> small_;
  std::optional<OwnArray<std::int32_t>> large_;
  std::int32_t* data_ = nullptr;
  std::size_t size_ = 0;
};

class SlotIndex {
 public:
  // The key of a slot is keys[slot * stride]. The keys belong to the caller, outlive the index and do not
  // move. `stays` says of each table whether its rows never leave; rows of tables that `stays` does not have
  // may leave. `ids` are those of the keys.
  SlotIndex(const std::uint64_t* keys, std::int64_t stride, std::int64_t capacity,
            const std::vector<bool>& stays = {}, LaneIds ids = {});

  static constexpr double kBytesPerSlot = 8.0 * 2;

  // Sets slots[i] to the slot of keys[i], or to -1.
  void Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const;
  // Sets slots[i] to the slot of keys[i] in *indices[i], or to -1.
  static void FindEach(const SlotIndex* const* indices, const std::uint64_t* keys, std::int64_t n,
                       std::int32_t* slots);
  // Sets slots[i] as Find does, and erases what it finds. No row of the keys' tables stays.
  void Take(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots);
  // The slot must have its key already, which must be absent from the index.
  void Insert(std::int32_t slot) { Insert(&slot, 1); }
  void Insert(const std::int32_t* slots, std::int64_t n);
  // The slot must still have its key.
  void Erase(std::int32_t slot) { Erase(&slot, 1); }
  void Erase(const std::int32_t* slots, std::int64_t n);

  std::int64_t size() const { return size_; }
  std::int64_t memory_bytes() const;

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};

  // Table has the rows of a table whose rows never leave.
  struct Table {
    bool stays;
    std::int64_t in_entries = 0;  // rows that have entries
    std::int64_t direct = 0;      // rows that `slots` has
    std::uint64_t ids = 0;        // the largest number of an id that had an entry, and one
    SlotArray slots = {};         // of the first numbers, -1: not here; other ids have entries
  };

  static std::uint32_t Tag(std::uint64_t key);
  // Returns the place of the key's slot if the key is kept directly, else null.
  std::int32_t* Direct(std::uint64_t key) const {
    const std::uint32_t table = KeyTable(key);
    const std::uint64_t number = ids_.NumberOf(key);
    if (table >= tables_.size() || number >= tables_[table].slots.size()) return nullptr;
    return tables_[table].slots.data() + number;
  }
  Table* StayingTable(std::uint64_t key) {
    const std::uint32_t table = KeyTable(key);
    return table < tables_.size() && tables_[table].stays ? &tables_[table] : nullptr;
  }
  std::int64_t RunLength(const std::uint64_t* keys, std::int64_t n) const;
  void FindEntries(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const;
  std::uint64_t PlaceOfKey(std::uint32_t tag, std::uint64_t home, std::uint64_t key) const;
  std::int32_t Probe(std::uint32_t tag, std::uint64_t home, std::uint64_t key) const;
  // Begins to fetch the entries of a block of keys, and the keys that these name.
  void FetchEntries(const std::uint64_t* keys, std::int64_t n, std::uint32_t* tags,
                    std::uint64_t* homes) const;
  void FindDirectly(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const;
  static bool IsDense(const Table& table);
  void KeepDirectly(Table* table);
  void MoveEntries(Table* table);
  void Rebuild(OwnArray<std::uint64_t> entries);
  const std::uint64_t& Key(std::uint32_t slot) const { return keys_[slot * stride_]; }
  static std::uint32_t EntryTag(std::uint64_t entry) { return static_cast<std::uint32_t>(entry >> 32); }
  static std::uint32_t EntrySlot(std::uint64_t entry) { return static_cast<std::uint32_t>(entry); }
  std::uint64_t Home(std::uint32_t tag) const { return HomePlace(tag, entries_.size()); }
  std::uint64_t Next(std::uint64_t at) const { return NextPlace(at, entries_.size()); }
  void Place(std::uint64_t entry);
  std::uint64_t PlaceOf(std::int32_t slot) const;
  void EraseAt(std::uint64_t hole);
  void Grow();

  const std::uint64_t* keys_;
  std::uint64_t stride_;
  std::int64_t capacity_;
  LaneIds ids_;
  OwnArray<std::uint64_t> entries_;
  std::int64_t in_entries_ = 0;
  std::vector<Table> tables_;
  bool any_direct_ = false;
  std::int64_t size_ = 0;
};

}  // namespace tierstore
