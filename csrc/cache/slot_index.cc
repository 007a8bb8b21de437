#include "cache/slot_index.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <utility>

#include "common/key.h"

namespace tierstore {
namespace {
// This many accesses to memory are begun before the first of them is waited for.
constexpr std::int64_t kBlock = 32;
// If fewer than one in this many entries are of a table, the entries of the table are moved one by one.
constexpr std::int64_t kFew = 16;

std::size_t EntriesFor(std::int64_t rows) {
  return static_cast<std::size_t>(std::max<std::int64_t>(rows, 24) * 2 + 1);
}
}  // namespace

SlotIndex::SlotIndex(const std::uint64_t* keys, std::int64_t stride, std::int64_t capacity,
                     const std::vector<bool>& stays, LaneIds ids)
    : keys_(keys),
      stride_(static_cast<std::uint64_t>(stride)),
      capacity_(capacity),
      ids_(ids),
      entries_(EntriesFor(capacity), kEmpty) {
  for (const bool table_stays : stays) tables_.push_back({table_stays});
}

std::int64_t SlotIndex::memory_bytes() const {
  std::size_t bytes = entries_.size() * sizeof(std::uint64_t);
  for (const Table& table : tables_) bytes += table.slots.size() * sizeof(std::int32_t);
  return static_cast<std::int64_t>(bytes);
}

std::uint32_t SlotIndex::Tag(std::uint64_t key) { return static_cast<std::uint32_t>(HashKey(key) >> 32); }

// Returns how many keys at the beginning are of the same table: as a rule all keys of a feature.
std::int64_t SlotIndex::RunLength(const std::uint64_t* keys, std::int64_t n) const {
  if (!any_direct_) return n;
  std::int64_t length = 1;
  while (length < n && KeyTable(keys[length]) == KeyTable(keys[0])) ++length;
  return length;
}

void SlotIndex::Find(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const {
  for (std::int64_t begin = 0; begin < n;) {
    const std::int64_t run = RunLength(keys + begin, n - begin);
    const std::uint32_t table = KeyTable(keys[begin]);
    if (table < tables_.size() && tables_[table].slots.size() != 0)
      FindDirectly(keys + begin, run, slots + begin);
    else
      FindEntries(keys + begin, run, slots + begin);
    begin += run;
  }
}

void SlotIndex::FindDirectly(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const {
  for (std::int64_t i = 0; i < n; ++i) {
    if (i + kBlock < n) __builtin_prefetch(Direct(keys[i + kBlock]));
    if (const std::int32_t* const slot = Direct(keys[i]); slot != nullptr)
      slots[i] = *slot;
    else
      FindEntries(&keys[i], 1, &slots[i]);
  }
}

void SlotIndex::FindEntries(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) const {
  std::uint32_t tags[kBlock];
  std::uint64_t homes[kBlock];
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    FetchEntries(keys + begin, count, tags, homes);
    for (std::int64_t i = 0; i < count; ++i) slots[begin + i] = Probe(tags[i], homes[i], keys[begin + i]);
  }
}

void SlotIndex::FetchEntries(const std::uint64_t* keys, std::int64_t n, std::uint32_t* tags,
                             std::uint64_t* homes) const {
  for (std::int64_t i = 0; i < n; ++i) {
    tags[i] = Tag(keys[i]);
    homes[i] = Home(tags[i]);
    __builtin_prefetch(&entries_[homes[i]]);
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t entry = entries_[homes[i]];
    if (entry != kEmpty && EntryTag(entry) == tags[i]) __builtin_prefetch(&Key(EntrySlot(entry)));
  }
}

// Returns where the entry of a key is, or would be: the entry there is empty then.
std::uint64_t SlotIndex::PlaceOfKey(std::uint32_t tag, std::uint64_t home, std::uint64_t key) const {
  std::uint64_t at = home;
  while (entries_[at] != kEmpty && (EntryTag(entries_[at]) != tag || Key(EntrySlot(entries_[at])) != key))
    at = Next(at);
  return at;
}

std::int32_t SlotIndex::Probe(std::uint32_t tag, std::uint64_t home, std::uint64_t key) const {
  const std::uint64_t entry = entries_[PlaceOfKey(tag, home, key)];
  return entry == kEmpty ? -1 : static_cast<std::int32_t>(EntrySlot(entry));
}

void SlotIndex::Take(const std::uint64_t* keys, std::int64_t n, std::int32_t* slots) {
  std::uint32_t tags[kBlock];
  std::uint64_t homes[kBlock];
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    FetchEntries(keys + begin, count, tags, homes);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t at = PlaceOfKey(tags[i], homes[i], keys[begin + i]);
      slots[begin + i] = -1;
      if (entries_[at] == kEmpty) continue;
      slots[begin + i] = static_cast<std::int32_t>(EntrySlot(entries_[at]));
      --size_;
      EraseAt(at);
    }
  }
}

void SlotIndex::FindEach(const SlotIndex* const* indices, const std::uint64_t* keys, std::int64_t n,
                         std::int32_t* slots) {
  const std::int32_t* direct[kBlock];
  std::uint32_t tags[kBlock];
  std::uint64_t homes[kBlock];
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    for (std::int64_t i = 0; i < count; ++i) {
      const SlotIndex& index = *indices[begin + i];
      direct[i] = index.Direct(keys[begin + i]);
      if (direct[i] != nullptr) {
        __builtin_prefetch(direct[i]);
        continue;
      }
      tags[i] = Tag(keys[begin + i]);
      homes[i] = index.Home(tags[i]);
      __builtin_prefetch(&index.entries_[homes[i]]);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      if (direct[i] != nullptr) continue;
      const SlotIndex& index = *indices[begin + i];
      const std::uint64_t entry = index.entries_[homes[i]];
      if (entry != kEmpty && EntryTag(entry) == tags[i]) __builtin_prefetch(&index.Key(EntrySlot(entry)));
    }
    for (std::int64_t i = 0; i < count; ++i) {
      slots[begin + i] =
          direct[i] != nullptr ? *direct[i] : indices[begin + i]->Probe(tags[i], homes[i], keys[begin + i]);
    }
  }
}

void SlotIndex::Place(std::uint64_t entry) {
  std::uint64_t at = Home(EntryTag(entry));
  while (entries_[at] != kEmpty) at = Next(at);
  entries_[at] = entry;
}

void SlotIndex::Grow() {
  OwnArray<std::uint64_t> old(entries_.size() * 2, kEmpty);
  std::swap(old, entries_);
  for (std::size_t i = 0; i < old.size(); ++i) {
    // An empty entry's home is a place, too.
    if (i + kBlock < old.size()) __builtin_prefetch(&entries_[Home(EntryTag(old[i + kBlock]))], 1);
    if (old[i] != kEmpty) Place(old[i]);
  }
}

void SlotIndex::Insert(const std::int32_t* slots, std::int64_t n) {
  std::uint32_t tags[kBlock];
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, n - begin);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t key = Key(static_cast<std::uint32_t>(slots[begin + i]));
      tags[i] = Tag(key);
      const std::int32_t* const direct = Direct(key);
      __builtin_prefetch(direct != nullptr ? static_cast<const void*>(direct) : &entries_[Home(tags[i])], 1);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const auto slot = static_cast<std::uint32_t>(slots[begin + i]);
      const std::uint64_t key = Key(slot);
      Table* const table = StayingTable(key);
      ++size_;
      if (std::int32_t* const direct = Direct(key); direct != nullptr) {
        *direct = slots[begin + i];
        ++table->direct;
        continue;
      }
      if (table != nullptr) {
        ++table->in_entries;
        table->ids = std::max(table->ids, ids_.NumberOf(key) + 1);
      }
      if (static_cast<std::uint64_t>(++in_entries_) * 2 > entries_.size() + 4) Grow();
      Place(std::uint64_t{tags[i]} << 32 | slot);
    }
  }
  for (Table& table : tables_) {
    if (table.stays && IsDense(table)) KeepDirectly(&table);
  }
}

// Returns whether a longer array is no larger than the entries of the table's rows would be.
bool SlotIndex::IsDense(const Table& table) {
  const double entries = static_cast<double>(table.in_entries + table.direct) * kBytesPerSlot;
  return table.ids > table.slots.size() &&
         entries >= static_cast<double>(std::bit_ceil(table.ids) * sizeof(std::int32_t));
}

// Moves the table's entries into an array, which is at least twice as long as the table's last array.
void SlotIndex::KeepDirectly(Table* table) {
  const bool few = table->in_entries * kFew < in_entries_;
  const std::int64_t staying = in_entries_ - table->in_entries;
  SlotArray slots;
  std::optional<OwnArray<std::uint64_t>> entries;  // of the other rows, with no more room than they need
  try {
    slots = SlotArray(std::bit_ceil(table->ids));
    if (!few) entries.emplace(EntriesFor(std::max(capacity_ - (size_ - staying), staying)), kEmpty);
  } catch (const std::exception&) {  // no memory, or no address space
    table->stays = false;            // the table goes on with entries
    return;
  }
  std::copy_n(table->slots.data(), table->slots.size(), slots.data());
  table->slots = std::move(slots);
  any_direct_ = true;
  if (few)
    MoveEntries(table);
  else
    Rebuild(std::move(*entries));
  in_entries_ = staying;
  table->direct += std::exchange(table->in_entries, 0);
}

void SlotIndex::MoveEntries(Table* table) {
  const auto number = static_cast<std::uint32_t>(table - tables_.data());
  for (std::uint64_t id = 0; id < table->ids; ++id) {
    std::int32_t* const place = table->slots.data() + id;
    if (*place >= 0) continue;
    const std::uint64_t key = ids_.KeyOf(number, id);
    FindEntries(&key, 1, place);
    if (*place >= 0) EraseAt(PlaceOf(*place));
  }
}

// Moves each entry into the array of its table, or into `entries` where the table has no array.
void SlotIndex::Rebuild(OwnArray<std::uint64_t> entries) {
  std::swap(entries, entries_);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i + kBlock < entries.size() && entries[i + kBlock] != kEmpty)
      __builtin_prefetch(&Key(EntrySlot(entries[i + kBlock])));
    const std::uint64_t entry = entries[i];
    if (entry == kEmpty) continue;
    const std::uint32_t slot = EntrySlot(entry);
    if (std::int32_t* const place = Direct(Key(slot)); place != nullptr)
      *place = static_cast<std::int32_t>(slot);
    else
      Place(entry);
  }
}

// Returns where the entry of a slot is.
std::uint64_t SlotIndex::PlaceOf(std::int32_t slot) const {
  std::uint64_t at = Home(Tag(Key(static_cast<std::uint32_t>(slot))));
  while (EntrySlot(entries_[at]) != static_cast<std::uint32_t>(slot)) at = Next(at);
  return at;
}

void SlotIndex::Erase(const std::int32_t* slots, std::int64_t n) {
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t end = std::min(begin + kBlock, n);
    for (std::int64_t i = begin; i < end; ++i) __builtin_prefetch(&Key(static_cast<std::uint32_t>(slots[i])));
    for (std::int64_t i = begin; i < end; ++i)
      __builtin_prefetch(&entries_[Home(Tag(Key(static_cast<std::uint32_t>(slots[i]))))], 1);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint64_t key = Key(static_cast<std::uint32_t>(slots[i]));
      Table* const table = StayingTable(key);
      --size_;
      if (std::int32_t* const direct = Direct(key); direct != nullptr) {
        *direct = -1;
        --table->direct;
        continue;
      }
      if (table != nullptr) --table->in_entries;
      EraseAt(PlaceOf(slots[i]));
    }
  }
}

void SlotIndex::EraseAt(std::uint64_t hole) {
  // Later entries of the probe run move back into the hole, so that no tombstones are needed.
  const std::uint64_t size = entries_.size();
  for (std::uint64_t at = Next(hole); entries_[at] != kEmpty; at = Next(at)) {
    const std::uint64_t home = Home(EntryTag(entries_[at]));
    const std::uint64_t from_home = at >= home ? at - home : at + size - home;
    const std::uint64_t from_hole = at >= hole ? at - hole : at + size - hole;
    if (from_home >= from_hole) {
      entries_[hole] = entries_[at];
      hole = at;
    }
  }
  entries_[hole] = kEmpty;
  --in_entries_;
}

}  // namespace tierstore
